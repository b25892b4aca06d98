"""From one shape of a pool to another under load: what to start and what to stop next.

A shape is what one replica looks like; a plan is a number of replicas of one shape. Replicas take
seconds to minutes to start, and finish what they have begun before they stop, and hold their GPUs
all that time. `next_wanted` looks at what there is and says how many replicas of every shape to ask
for now: never more GPUs than the budget, never fewer ready replicas than the minimum. Called again
and again, it ends with the target.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tokenyard.allocation.types import Plan


@dataclass(frozen=True, slots=True, order=True)
class Shape:
    """What one replica of a plan looks like."""

    tensor_parallel: int
    """GPUs that share every layer."""
    pipeline_parallel: int
    """Stages that the layers are divided into."""
    memory_fraction: float

    @property
    def num_gpus(self) -> int:
        """GPUs that the replica holds."""
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def name(self) -> str:
        """Part of the name of its deployment."""
        memory = round(100 * self.memory_fraction)
        return f"tp{self.tensor_parallel}-pp{self.pipeline_parallel}-m{memory}"


def shape_of(plan: Plan) -> Shape:
    """The shape of a plan's replicas, without its batch limit, which can change while they run."""
    return Shape(plan.tensor_parallel, plan.pipeline_parallel, plan.memory_fraction)


@dataclass(frozen=True, slots=True)
class Held:
    """Replicas of one shape."""

    wanted: int = 0
    """Asked for last."""
    ready: int = 0
    starting: int = 0
    stopping: int = 0

    @property
    def num_alive(self) -> int:
        """Replicas that hold GPUs, including those that are still to start."""
        return max(self.ready + self.starting, self.wanted) + self.stopping

    @property
    def num_serving(self) -> int:
        """Ready replicas that are to stay."""
        return min(self.ready, self.wanted)


def gpus_held(held: Mapping[Shape, Held]) -> int:
    """GPUs that are taken now."""
    return sum(replicas.num_alive * shape.num_gpus for shape, replicas in held.items())


def is_done(held: Mapping[Shape, Held], target: Shape, count: int) -> bool:
    """Whether there are only replicas of the target."""
    others = (replicas for shape, replicas in held.items() if shape != target)
    here = held.get(target, Held())
    return here == Held(wanted=count, ready=count) and not any(other.num_alive for other in others)


def next_wanted(
    held: Mapping[Shape, Held], target: Shape, count: int, budget: int, minimum: int
) -> dict[Shape, int]:
    """Return how many replicas of every shape to ask for now.

    Args:
        held: What there is.
        target: Shape to end with.
        count: Replicas of it.
        budget: GPUs that may be held at any moment.
        minimum: Replicas that stay ready, as far as there are so many now; 0 lets service pause.
    """
    wanted = {shape: replicas.wanted for shape, replicas in held.items()} | {
        target: held.get(target, Held()).wanted
    }
    here = held.get(target, Held())
    if here.wanted > count:
        # Those that start are in no one's service; which of the ready ones go is Serve's choice.
        wanted[target] = count
        return wanted
    if here.num_serving == count:
        return {shape: count if shape == target else 0 for shape in wanted}
    room = (budget - gpus_held(held)) // target.num_gpus
    if here.wanted < count and room > 0:
        wanted[target] = min(count, here.wanted + room)
        return wanted
    others = {shape: replicas for shape, replicas in held.items() if shape != target}
    if here.wanted < count and any(other.wanted > other.ready for other in others.values()):
        # What starts elsewhere serves nobody, and may never be ready.
        return wanted | {shape: replicas.num_serving for shape, replicas in others.items()}
    moving = any(not r.num_alive == r.wanted == r.ready for r in held.values())
    if here.wanted < count and not moving:
        _make_room(wanted, held, target, count, budget, minimum)
    return wanted


def _make_room(
    wanted: dict[Shape, int],
    held: Mapping[Shape, Held],
    target: Shape,
    count: int,
    budget: int,
    minimum: int,
) -> None:
    """Stop at most half of the other replicas: the rest serves until new ones are ready."""
    missing = (count - wanted[target]) * target.num_gpus - (budget - gpus_held(held))
    serving = sum(replicas.num_serving for replicas in held.values())
    others = [shape for shape, replicas in held.items() if shape != target and replicas.num_serving]
    gpus = sum(held[shape].num_serving * shape.num_gpus for shape in others)
    least = target.num_gpus - (budget - gpus_held(held))
    freed = 0
    while freed < min(missing, max(least, gpus // 2)) and serving > minimum:
        shape = max(filter(wanted.__getitem__, others), key=wanted.__getitem__, default=None)
        if shape is None:
            return
        wanted[shape] -= 1
        serving -= 1
        freed += shape.num_gpus


def is_reachable(now: Plan, target: Plan, budget: int, minimum: int) -> bool:
    """Whether one plan can become the other within budget and minimum."""
    held = {shape_of(now): Held(wanted=now.num_replicas, ready=now.num_replicas)}
    shape, count = shape_of(target), target.num_replicas
    # Every step that does anything starts or stops a replica, and none is undone.
    for _ in range(2 * (now.num_replicas + count) + 2):
        if is_done(held, shape, count):
            return True
        wanted = next_wanted(held, shape, count, budget, min(minimum, now.num_replicas))
        held = {other: Held(wanted=n, ready=n) for other, n in wanted.items() if n}
    return is_done(held, shape, count)
