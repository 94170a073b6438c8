"""Reinforcement learning: observers act in worlds of their own and ask the agent what to do."""

import os

import torch
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
from torch import nn, optim
from torch.distributed.rpc import RRef, remote, rpc_async, rpc_sync

PROCESSES = 3
EPISODES = 3
STEPS = 6


class Walk:
    """A world: a place on a line, to be brought to zero."""

    def __init__(self, seed):
        self.generator = torch.Generator().manual_seed(seed)

    def reset(self):
        self.place = torch.randn(2, generator=self.generator)
        return self.place

    def step(self, action):
        self.place = self.place + (0.3 if action == 1 else -0.3)
        return self.place, -self.place.abs().sum().item()


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 2))

    def forward(self, state):
        return torch.log_softmax(self.layers(state), dim=-1)


def call_method(method, rref, *args, **kwargs):
    return method(rref.local_value(), *args, **kwargs)


def remote_method(method, rref, *args, **kwargs):
    return rpc_sync(rref.owner(), call_method, args=[method, rref, *args], kwargs=kwargs)


class Observer:
    def __init__(self):
        self.id = rpc.get_worker_info().id
        self.world = Walk(self.id)

    def run_episode(self, agent_rref, num_steps):
        state = self.world.reset()
        for _ in range(num_steps):
            action = remote_method(Agent.select_action, agent_rref, self.id, state)
            state, reward = self.world.step(action)
            remote_method(Agent.report_reward, agent_rref, self.id, reward)


class Agent:
    def __init__(self, world_size):
        torch.manual_seed(5)
        self.agent_rref = RRef(self)
        self.policy = Policy()
        self.optimizer = optim.Adam(self.policy.parameters(), lr=0.05)
        self.observer_rrefs = [remote(rpc.get_worker_info(f"ob{i}"), Observer) for i in range(1, world_size)]
        self.rewards = {rref.owner().id: [] for rref in self.observer_rrefs}
        self.log_probabilities = {rref.owner().id: [] for rref in self.observer_rrefs}

    def select_action(self, observer_id, state):
        choices = self.policy(state)
        action = int(choices.argmax())
        self.log_probabilities[observer_id].append(choices[action])
        return action

    def report_reward(self, observer_id, reward):
        self.rewards[observer_id].append(reward)

    def run_episode(self):
        futures = [
            rpc_async(rref.owner(), call_method, args=(Observer.run_episode, rref, self.agent_rref, STEPS))
            for rref in self.observer_rrefs
        ]
        for future in futures:
            future.wait()

    def finish_episode(self):
        loss = torch.zeros(())
        for observer_id in sorted(self.rewards):
            for log_probability, reward in zip(
                self.log_probabilities[observer_id], self.rewards[observer_id], strict=True
            ):
                loss = loss - log_probability * reward
        total = sum(map(sum, self.rewards.values()))
        for observer_id in self.rewards:
            self.rewards[observer_id] = []
            self.log_probabilities[observer_id] = []
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return total, loss.item()


def run_worker(rank, world_size):
    if rank == 0:
        rpc.init_rpc("agent", rank=rank, world_size=world_size)
        agent = Agent(world_size)
        for episode in range(EPISODES):
            agent.run_episode()
            total, loss = agent.finish_episode()
            print(f"episode {episode}: reward {total:.4f}, loss {loss:.4f}")
    else:
        rpc.init_rpc(f"ob{rank}", rank=rank, world_size=world_size)
    rpc.shutdown()


if __name__ == "__main__":
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "29500")
    mp.spawn(run_worker, args=(PROCESSES,), nprocs=PROCESSES)
