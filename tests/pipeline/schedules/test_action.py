import pytest

from megagrid.errors import MegagridError
from megagrid.pipeline.schedules import Action, Kind, ScheduleError, Step


@pytest.mark.parametrize("kind", Kind)
def test_token_is_read_back_as_the_action_that_wrote_it(kind):
    microbatch = None if kind in (Kind.REDUCE_GRAD, Kind.REDUCE_TIED) else 13
    action = Action(7, kind, microbatch)
    assert Action.parse(str(action)) == action


@pytest.mark.parametrize(
    ("action", "token"),
    [
        (Action(2, Kind.F, 0), "2F0"),
        (Action(2, Kind.SEND_F, 0), "2SEND_F0"),
        (Action(0, Kind.REDUCE_GRAD), "0REDUCE_GRAD"),
    ],
)
def test_token_is_stage_kind_microbatch(action, token):
    assert str(action) == token


@pytest.mark.parametrize("token", ["", "F0", "2F", "2X0", "2f0", "2F0 ", "2F-1", "0REDUCE_GRAD3"])
def test_what_is_no_token_is_refused_with_an_example(token):
    with pytest.raises(MegagridError, match=r"is no action; .* such as 2F0"):
        Action.parse(token)


@pytest.mark.parametrize(("send", "recv"), [("2SEND_F5", "3RECV_F5"), ("3SEND_B5", "2RECV_B5")])
def test_send_names_the_maker_and_recv_the_consumer(send, recv):
    assert Action.parse(send).other_end == Action.parse(recv)
    assert Action.parse(recv).other_end == Action.parse(send)


def test_a_step_is_an_action_or_a_batch():
    compute, batch = Step.parse("0B1"), Step.parse("0SEND_F2+0RECV_B1")
    reduction = Step.parse("0REDUCE_GRAD")
    assert compute.is_compute and compute.action == Action(0, Kind.B, 1) and compute.batch == ()
    assert batch.is_batch and [str(message) for message in batch.batch] == ["0SEND_F2", "0RECV_B1"]
    assert not reduction.is_compute and not reduction.is_batch
    assert [str(step) for step in (compute, batch)] == ["0B1", "0SEND_F2+0RECV_B1"]


@pytest.mark.parametrize("text", ["0F0+0F1", "0F0+0SEND_F0", "0REDUCE_GRAD+1REDUCE_GRAD"])
def test_only_messages_share_a_step(text):
    with pytest.raises(ScheduleError, match="only SEND and RECV may share a step"):
        Step.parse(text)
