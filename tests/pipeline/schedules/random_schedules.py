"""Random legal schedules, for property tests."""

from hypothesis import strategies as st

from megagrid.pipeline.schedules import Action, Kind, Schedule
from megagrid.pipeline.schedules.timing import inputs_of


@st.composite
def schedules(draw, min_stages=1, min_ranks=1, *, sizes=None):
    """Any placement, any order that can run, backwards whole or split one by one.

    Args:
        sizes: strategy of (stages, ranks, microbatches); None: small ones from the minima on.
    """
    if sizes is not None:
        stages, ranks, microbatches = draw(sizes)
    else:
        stages = draw(st.integers(max(min_stages, min_ranks), 5))
        ranks = draw(st.integers(min_ranks, min(stages, 4)))
        microbatches = draw(st.integers(1, 4))
    others = draw(
        st.lists(st.integers(0, ranks - 1), min_size=stages - ranks, max_size=stages - ranks)
    )
    placement = tuple(draw(st.permutations([*range(ranks), *others])))
    bare = Schedule("random", ranks, microbatches, placement, (10**6,) * ranks, ((),) * ranks)
    due = set()
    for stage in range(stages):
        for microbatch in range(microbatches):
            backward = (Kind.B,) if draw(st.booleans()) else (Kind.I, Kind.W)
            due |= {Action(stage, kind, microbatch) for kind in (Kind.F, *backward)}
    orders = [[] for _ in range(ranks)]
    done = set()
    while due:
        ready = [
            action
            for action in sorted(due, key=str)
            if all(not done.isdisjoint(makers) for makers in inputs_of(bare, action))
        ]
        action = draw(st.sampled_from(ready))
        orders[placement[action.stage]].append(action)
        due.remove(action)
        done.add(action)
    return Schedule(
        "random", ranks, microbatches, placement, (10**6,) * ranks, tuple(map(tuple, orders))
    )
