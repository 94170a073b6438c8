"""Every rank calls its neighbour once, and the one half the group away; for jobs of many ranks."""

import mpirpc as rpc


def hello(name):
    """Greet from here."""
    return f"{name} meets {rpc.get_worker_info().name}"


rpc.init_rpc()
me, size = rpc.get_worker_info(), len(rpc.get_worker_infos())
for distance in (1, size // 2):
    other = (me.id + distance) % size
    assert rpc.rpc_sync(other, hello, args=(me.name,), timeout=100) == f"{me.name} meets worker{other}"
rpc.shutdown()
if me.id == 0:
    print(f"OK: {size} ranks")
