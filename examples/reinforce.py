"""Reinforcement learning (REINFORCE): several observers play, one agent decides for all of them and learns.

    mpirun -n 4 python examples/reinforce.py

The game, made here: a corridor with a door at each end, and a sign that tells which door leads out. The
player begins somewhere in the middle and steps left or right; the right door gives 1, the wrong one nothing,
each step costs a little, and after MAX_LENGTH steps the game is over.

Rank 0 is the agent. Every other rank observes a corridor of its own. At each step it asks the agent what to
do. The agent's method is marked with ``async_execution``: it collects the questions of all observers, runs
its policy once on the whole batch, and answers them together. After NUM_STEPS steps the observers report
their rewards and the agent makes a step of policy gradient. Whoever asks first, the batch is in order of the
observers, so a run can be repeated exactly.

Prints the mean reward of a game now and then and, from rank 0, as the last line:
``OK: the agent learned to read the sign``; that is, the last round's mean is more than GOOD_REWARD, and more
than the first round's. A player who knows what the sign means gets 0.92, one who walks at random about 0.3.
"""

from __future__ import annotations

import random
import sys
import threading
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn, optim
from torch.distributions import Categorical
from torch.futures import Future

import mpirpc as rpc
from mpirpc.functions import async_execution

NUM_ROUNDS = 20
NUM_STEPS = 64
"""Steps of every observer between two steps of the optimizer."""
END = 4
"""The doors are at positions END and -END."""
MAX_LENGTH = 16
STEP_COST = 0.02
GOOD_REWARD = 0.8


class Corridor:
    """The game. An action is 0, to the left, or 1, to the right."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.begin()

    def begin(self) -> None:
        """Begin a new game."""
        self.position, self.length = self.random.choice([-1, 0, 1]), 0
        self.sign = self.random.choice([-1, 1])

    def state(self) -> Tensor:
        """What the player sees: where they are, and the sign."""
        return torch.tensor([self.position / END, float(self.sign)])

    def step(self, action: int) -> tuple[float, bool]:
        """Move; returns the reward, and whether the game is over."""
        self.position += 1 if action == 1 else -1
        self.length += 1
        at_door = abs(self.position) == END
        won = at_door and self.position * self.sign > 0
        return float(won) - STEP_COST, at_door or self.length == MAX_LENGTH


@dataclass
class Report:
    """What an observer saw in NUM_STEPS steps."""

    returns: list[float] = field(default_factory=list)
    """For each step, the reward from there to the end of its game, or of the report."""
    games: list[float] = field(default_factory=list)
    """The whole reward of each game that ended."""


class Observer:
    """Plays in a corridor as the agent says; lives on the observer's rank.

    Args:
        number: Its place in the agent's batches.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.corridor = Corridor(seed=number)

    def play(self, agent: rpc.RRef[Agent]) -> Report:
        """Make NUM_STEPS steps, beginning with a new game."""
        report, rewards = Report(), []
        self.corridor.begin()
        for step in range(NUM_STEPS):
            action = agent.rpc_sync().choose(self.number, self.corridor.state())
            reward, is_over = self.corridor.step(action)
            rewards.append(reward)
            if is_over:
                report.games.append(sum(rewards))
            if is_over or step == NUM_STEPS - 1:
                report.returns += [sum(rewards[i:]) for i in range(len(rewards))]
                rewards = []
                self.corridor.begin()
        return report


class Agent:
    """Decides for all observers and learns from their rewards; lives on rank 0."""

    def __init__(self, num_observers: int) -> None:
        torch.manual_seed(0)
        self.policy = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2))
        self.optimizer = optim.Adam(self.policy.parameters(), lr=0.03)
        self.num_observers = num_observers
        self.mutex = threading.Lock()  # around the next two: calls run on several threads
        self.states: dict[int, Tensor] = {}  # by observer, of the batch that is being collected
        self.actions: Future[list[int]] = Future()  # for all observers of that batch
        self.log_probs: list[Tensor] = []  # (num_observers) of each step since the last report

    @async_execution
    def choose(self, observer: int, state: Tensor) -> Future[int]:
        """Take an observer's state; the answer is its action, once all have asked."""
        with self.mutex:
            actions = self.actions
            self.states[observer] = state
            batch = self.states
            is_last = len(batch) == self.num_observers
            if is_last:
                self.states, self.actions = {}, Future()
        if is_last:
            actions.set_result(self.decide(torch.stack([batch[key] for key in sorted(batch)])))
        return actions.then(lambda done: done.value()[observer - 1])

    def decide(self, states: Tensor) -> list[int]:
        """Draw an action for each observer."""
        distribution = Categorical(logits=self.policy(states))
        actions = distribution.sample()
        self.log_probs.append(distribution.log_prob(actions))
        return actions.tolist()

    def learn(self, reports: list[Report]) -> None:
        """Make the actions more likely that were followed by more than the mean reward."""
        returns = torch.tensor([report.returns for report in reports])  # (num_observers, NUM_STEPS)
        advantages = (returns - returns.mean()) / (returns.std() + 1e-6)
        loss = -(torch.stack(self.log_probs, dim=1) * advantages).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.log_probs.clear()


def drive(workers: list[rpc.WorkerInfo]) -> int:
    """What rank 0 does. Returns an exit status."""
    agent = Agent(len(workers))
    agent_rref = rpc.RRef(agent)
    observers = [rpc.remote(worker, Observer, args=(worker.id,)) for worker in workers]
    means = []
    for number in range(NUM_ROUNDS):
        playing = [observer.rpc_async().play(agent_rref) for observer in observers]
        reports = [future.wait() for future in playing]
        games = [reward for report in reports for reward in report.games]
        means.append(sum(games) / len(games))
        agent.learn(reports)
        if number % 5 == 0 or number == NUM_ROUNDS - 1:
            print(f"round {number + 1}: {len(games)} games, mean reward {means[-1]:.2f}", flush=True)
    if not means[-1] > max(GOOD_REWARD, means[0]):
        print(f"FAILED: more than {GOOD_REWARD} is needed, and more than at first", flush=True)
        return 1
    print("OK: the agent learned to read the sign", flush=True)
    return 0


def main() -> int:
    rpc.init_rpc()
    status = 0
    if rpc.get_worker_info().id == 0:
        workers = rpc.get_worker_infos()[1:]
        status = drive(workers) if workers else refuse()
    rpc.shutdown()  # the other ranks serve until here
    return status


def refuse() -> int:
    print("needs two or more ranks: mpirun -n 4 python examples/reinforce.py", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
