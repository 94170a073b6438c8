"""pytest-mpi would take no notice of this argument."""

import pytest


@pytest.mark.mpi(minsize=2)
def test_misspelt():
    pass
