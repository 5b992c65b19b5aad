"""What becomes of a job whose ranks end, by the words of its nodes alone."""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest

from megagrid.launcher.rounds import (
    ENDED,
    GONE,
    LAST_CALL_SECONDS,
    RUNNING,
    SECONDS_AFTER_A_CRASH,
    STOOD_STILL,
    WAITING,
    Council,
    Failure,
    JobWord,
    Member,
    NodeWord,
    Terms,
    Verdict,
)


class Job:
    """Nodes of two ranks each, and their council. All of them have made a step."""

    def __init__(self, nodes: int = 1, **terms: object) -> None:
        self.now = 0.0
        fewest = terms.pop("fewest", nodes)
        self.council = Council(Terms(fewest=fewest, most=nodes, **terms), lambda: self.now)
        self.words = {
            node: NodeWord(f"agent {node}", f"host{node}", 2, "run", has_begun=True)
            for node in range(nodes)
        }
        self.lost: set[int] = set()

    @property
    def job(self) -> JobWord:
        return self.council.job

    def hear(self, **seconds: float) -> JobWord:
        self.now += seconds.get("after", 0.1)
        return self.council.hear(self.words, self.lost)

    def say(self, node: int, **changes: object) -> None:
        self.words[node] = replace(self.words[node], **changes)

    def start(self) -> JobWord:
        """All nodes that are asked to start ranks do so."""
        self.hear()
        for node in self.job.nodes:
            self.say(node, at=RUNNING, round=self.job.round, failures=())
        return self.hear()

    def end(self, codes: dict[int, int], **more: object) -> JobWord:
        """Ranks end with `codes`, those of the first one first; then all others."""
        for place, (rank, code) in enumerate(codes.items()):
            node = rank // 2
            text = f"mistake of {rank}" if code == 2 else f"ended with {code}"
            failure = Failure(rank, f"rank {rank}", code, float(place), text)
            if code:
                self.say(node, failures=(*self.words[node].failures, failure), **more)
        self.hear()
        for node in self.job.nodes:
            self.say(node, at=ENDED)
        self.hear()
        return self.hear()

    def wait(self) -> JobWord:
        """Nodes whose ranks have ended are ready for others."""
        for node, word in self.words.items():
            if node not in self.lost and word.at == ENDED:
                self.say(node, at=WAITING, failures=())
        return self.start()


# ------------------------------------------------------------------------------------------------
# The end


@pytest.mark.parametrize(
    ("codes", "verdict"),
    [
        ({0: 0, 1: 0}, (0, "")),
        ({0: 2, 1: 2}, (2, "mistake of 0")),
        ({1: 2}, (2, "mistake of 1")),
        ({1: 1, 3: 2}, (2, "mistake of 3")),
        ({1: 1}, (1, "rank 1 ended with 1")),
        ({2: -9}, (1, "rank 2 ended with -9")),
        ({0: 3, 1: -9}, (1, "rank 1 ended with -9")),
        ({1: 3, 0: 3}, (1, "rank 1 ended with 3")),
        ({0: 1, 3: STOOD_STILL}, (1, f"rank 3 ended with {STOOD_STILL}")),
        ({0: 69, 1: 3}, (69, "rank 0 ended with 69")),
        ({0: 69, 1: -9}, (1, "rank 1 ended with -9")),
        ({0: 75, 1: 75}, (75, "")),
        ({0: 75, 1: -15}, (75, "")),
        ({0: 75, 1: 2}, (2, "mistake of 1")),
        ({0: 130, 1: 3}, (130, "")),
    ],
    ids=[
        "done",
        "a mistake of all",
        "of another rank",
        "of a rank whose peer was first",
        "a crash",
        "a signal",
        "a signal and its peer",
        "peers elsewhere",
        "stood still",
        "waited in vain",
        "waited for one that was killed",
        "stopped",
        "stopped, and one late",
        "not saved",
        "interrupted",
    ],
)
def test_the_reason_why_ranks_ended_is_one_line_and_one_exit_code(codes, verdict):
    job = Job(2)
    job.start()
    assert job.end(codes).verdict == Verdict(*verdict)


@pytest.mark.parametrize(
    ("codes", "code"),
    [({0: 75, 1: 75}, 75), ({0: -15, 1: -15}, 143), ({0: 130, 1: 130}, 130), ({0: 0}, 0)],
    ids=["saved", "before they could", "interrupted", "all was done"],
)
def test_after_a_signal_to_the_launcher_its_ranks_say_how_the_job_ended(codes, code):
    job = Job(max_restarts=3)
    job.start()
    job.say(0, signal=signal.SIGTERM)
    assert job.end(codes).verdict == Verdict(code)


def test_a_signal_before_there_are_ranks_ends_all_nodes():
    job = Job(2)
    del job.words[1]
    assert job.hear().verdict is None
    job.say(0, signal=signal.SIGTERM)
    assert job.hear().verdict == Verdict(143)


@pytest.mark.parametrize("code", [2, 75, 130])
def test_a_mistake_and_a_stop_are_not_tried_again(code):
    """E7."""
    job = Job(2, max_restarts=3)
    job.start()
    assert job.end({0: code}).verdict.code == code
    assert (job.job.round, job.job.restarts) == (1, 0)


def test_what_crashes_before_the_first_step_is_not_tried_again():
    job = Job(2, max_restarts=3)
    for node in job.words:
        job.say(node, has_begun=False)
    job.start()
    assert job.end({1: -9}).verdict == Verdict(1, "rank 1 ended with -9")


def test_a_mistake_on_one_node_before_there_are_ranks_ends_all():
    job = Job(2, max_restarts=3)
    failure = Failure(-1, "", 2, 0.0, "no data there")
    job.say(1, at=GONE, failures=(failure,), run="")
    assert job.hear().verdict == Verdict(2, "no data there")


def test_a_node_with_another_recipe_ends_all():
    job = Job(2)
    job.say(1, run="another")
    verdict = job.hear().verdict
    assert verdict.code == 2
    assert verdict.text.startswith("node 1 (host1) was started with another recipe")


def test_nodes_that_never_come_are_told_after_the_time_out():
    job = Job(3, seconds_to_meet=60.0)
    del job.words[2]
    assert job.hear(after=59.0).verdict is None
    verdict = job.hear(after=2.0).verdict
    assert verdict.code == 69
    assert verdict.text.startswith("2 of 3 nodes have come in 60 s")


# ------------------------------------------------------------------------------------------------
# Another round


def test_a_crash_is_tried_again_so_often():
    job = Job(2, max_restarts=2)
    job.start()
    for restarts in (1, 2):
        assert job.end({3: 3, 1: -9}).forming
        assert job.wait().round == restarts + 1
        assert job.job.restarts == restarts
        assert job.job.news == f"rank 1 ended with -9; restart {restarts} of 2"
        assert (job.job.over, job.job.verdict) == (None, None)
    assert job.end({2: -9}).verdict == Verdict(1, "rank 2 ended with -9")


def test_a_round_waits_for_the_ranks_of_the_last_one_to_end():
    job = Job(2, max_restarts=1)
    job.start()
    job.say(0, failures=(Failure(0, "rank 0", -9, 0.0, "ended"),))
    assert (job.hear().over, job.job.asks) == (SECONDS_AFTER_A_CRASH, True)
    job.say(0, at=ENDED)
    assert not job.hear(after=10.0).forming
    job.say(1, at=ENDED)
    assert job.hear().forming
    job.say(0, at=WAITING, failures=())
    assert job.hear().round == 1
    job.say(1, at=WAITING)
    assert job.hear().round == 2


def test_ranks_that_save_for_a_stop_are_given_the_time_for_it():
    job = Job(2, seconds_to_stop=300.0)
    job.start()
    job.say(0, failures=(Failure(0, "rank 0", 75, 0.0, "saved"),))
    assert (job.hear().over, job.job.asks) == (300.0, False)


@pytest.mark.parametrize("code", [3, 75], ids=["left alone", "saved at its launcher's end"])
def test_a_lost_node_is_told_and_the_others_go_on_if_they_are_enough(code):
    """Ranks that are left alone fail, and those whose launcher was killed save before they end."""
    job = Job(3, fewest=2, max_restarts=1)
    assert job.start().members == (Member(0, 2), Member(1, 2), Member(2, 2))
    job.say(0, failures=(Failure(0, "rank 0", code, 0.0, "ended"),))
    job.hear()
    job.say(0, at=ENDED)
    job.say(2, at=ENDED)
    assert not job.hear(after=5.0).forming, "node 1 may only be slow to end its ranks"
    job.lost = {1}
    assert job.hear().forming
    assert job.wait().members == (Member(0, 2), Member(2, 2))
    assert job.job.news.startswith("node 1 (host1) is gone")
    job.lost = {1, 2}
    job.hear()
    job.say(0, at=ENDED)
    verdict = job.hear().verdict
    assert verdict.code == 1
    assert verdict.text.startswith("node 2 (host2) is gone")


def test_too_few_nodes_do_not_go_on():
    job = Job(2, max_restarts=5)
    job.start()
    job.lost = {1}
    job.hear()
    job.say(0, at=ENDED)
    job.hear()
    job.wait()
    assert job.job.verdict == Verdict(
        1,
        "node 1 (host1) is gone: nothing comes from its launcher; 1 of at least 2 nodes are left",
    )


def test_nodes_that_the_recipe_cannot_use_wait_for_others():
    """Of three that are left a batch that is a power of two takes two."""
    job = Job(4, fewest=1, max_restarts=1, refuses=lambda ranks: "three" if ranks == 6 else None)
    job.start()
    job.lost = {3}
    job.hear()
    for node in (0, 1, 2):
        job.say(node, at=ENDED)
    job.hear()
    assert job.wait().nodes == [0, 1]
    assert job.hear().over is None


def test_a_recipe_that_goes_with_no_smaller_grid_is_refused_by_name():
    job = Job(
        2, fewest=1, max_restarts=1, refuses=lambda ranks: "pp doesn't fit" if ranks < 4 else None
    )
    job.start()
    job.lost = {1}
    job.hear()
    job.say(0, at=ENDED)
    job.hear()
    job.wait()
    assert job.job.verdict.text.endswith("its launcher; pp doesn't fit")


# ------------------------------------------------------------------------------------------------
# Nodes that come


def test_the_first_round_begins_with_all_or_with_enough_at_the_last_call():
    job = Job(3, fewest=2)
    late = job.words.pop(2)
    assert job.hear().round == 0
    assert job.hear(after=LAST_CALL_SECONDS - 1).round == 0
    assert job.hear(after=2.0).nodes == [0, 1]
    for node in (0, 1):
        job.say(node, at=RUNNING, round=1)
    job.words[2] = late
    assert (job.hear().over, job.job.asks) == (600.0, True)
    assert job.end({0: 75, 1: 75, 2: 75, 3: 75}).forming
    assert job.wait().nodes == [0, 1, 2]
    assert (job.job.round, job.job.restarts) == (2, 0)
    assert job.job.news == "node 2 (host2) takes part"


def test_a_launcher_that_is_started_anew_takes_its_place_in_the_next_round():
    job = Job(2, max_restarts=1)
    job.start()
    job.say(1, agent="another", at=WAITING, round=0)
    assert job.hear().over is not None
    job.say(0, at=ENDED)
    assert job.hear().forming
    assert job.wait().nodes == [0, 1]


def test_a_newcomer_with_another_recipe_does_not_disturb_the_job():
    job = Job(2, fewest=1)
    late = job.words.pop(1)
    job.hear()
    job.hear(after=LAST_CALL_SECONDS + 1)
    job.start()
    job.words[1] = replace(late, run="another")
    assert (job.hear().over, job.job.verdict) == (None, None)


def test_words_survive_their_way():
    failure = Failure(1, "rank 1", -9, 2.5, "was ended")
    word = NodeWord("agent", "host", 2, "run", RUNNING, 3, (failure,), True, 15, 7)
    assert NodeWord.from_json(word.to_json()) == word
    for verdict in (None, Verdict(1, "text")):
        job = JobWord(2, (Member(0, 2),), 2950, 1, "news", 5.0, True, False, verdict)
        assert JobWord.from_json(job.to_json()) == job
