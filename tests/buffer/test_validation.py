"""What a trajectory must be before it is acknowledged: each refusal names its field."""

import msgspec
import numpy as np
import pytest
from motley_api.records import Candidates, Turn
from motley_trainer.buffer.validate import RefusedError, check
from trainer.kit import RUN, make_trajectory, make_work


def accept(trajectory, **options):
    check(trajectory, **({"run": RUN, "published": 3, "quarantined": frozenset()} | options))


def changed(**fields):
    return msgspec.structs.replace(make_trajectory(make_work(), 1), **fields)


def turns(*pairs, versions=(0, 0)):
    return [Turn(start=a, end=b, start_version=versions[0], end_version=versions[1], latency_s=1.0) for a, b in pairs]


def supports(size: int, *, q=(0.6, 0.4), ids=(5, 7), own=0):
    """`size` generated tokens, each id 5 (own=0) drawn from two candidates."""
    return changed(
        token_ids=np.full(size + 2, ids[own], "<i4").tobytes(),
        turns=turns((2, size + 2)),
        logprobs=np.full(size, np.log(q[own]), "<f4").tobytes(),
        candidates=Candidates(
            counts=np.full(size, 2, "<u2").tobytes(),
            ids=np.tile(np.array(ids, "<u4"), size).tobytes(),
            logprobs=np.tile(np.log(np.array(q)).astype("<f4"), size).tobytes(),
        ),
    )


def test_a_sound_trajectory_is_accepted():
    accept(make_trajectory(make_work(), 0))
    accept(supports(3))


@pytest.mark.parametrize(
    ("trajectory", "field"),
    [
        (changed(run="other"), "run: is 'other'"),
        (changed(id="1/9"), "id: is '1/9', want '<work>/<sample>' = '1/1'"),
        (changed(reward=float("nan")), "reward"),
        (changed(temperature=0.0), "temperature"),
        (changed(token_ids=b"123"), "tokenIds: 3 bytes"),
        (changed(turns=turns((6, 200))), r"turns\[0\]: \[6, 200\)"),
        (changed(turns=turns((6, 9), (8, 10))), r"turns\[1\]: \[8, 10\) overlaps"),
        (changed(turns=turns((0, 2))), "starts at token 0"),
        (changed(turns=turns((6, 9), versions=(3, 2))), "versions 3 to 2"),
        (changed(turns=turns((6, 9), versions=(-1, 0))), "versions -1 to 0"),
        (changed(logprobs=b""), "logprobs: 0 of them"),
        (changed(candidates=None), "candidates: missing"),
        (supports(2, q=(0.6, 0.3)), "support of generated token 0 sums to 0.9"),
        (supports(2, ids=(5, 5)), "an id occurs twice"),
        (supports(2, q=(2.0, 0.4)), "above 0"),
    ],
)
def test_refusals_name_the_field(trajectory, field):
    with pytest.raises(RefusedError, match=field):
        accept(trajectory)


def test_a_sampled_token_outside_its_support_is_refused():
    good = supports(2)
    with pytest.raises(RefusedError, match="sampled id 9 of generated token 0 is not in its support"):
        accept(msgspec.structs.replace(good, token_ids=np.full(4, 9, "<i4").tobytes()))


def test_log_probs_from_before_the_filter_are_refused():
    # The support says .6, but the token's own log-prob is that of the unfiltered .54.
    with pytest.raises(RefusedError, match="taken before the filter"):
        accept(msgspec.structs.replace(supports(2), logprobs=np.full(2, np.log(0.54), "<f4").tobytes()))


def test_a_version_that_is_not_published_is_refused_until_it_is():
    ahead = changed(turns=turns((6, 9), versions=(3, 4)), logprobs=b"")
    with pytest.raises(RefusedError, match="version: 4 is not published"):
        accept(ahead, published=3)
    accept(make_trajectory(make_work(), 0, version=4), published=4)


def test_samples_of_a_quarantined_group_are_refused():
    with pytest.raises(RefusedError, match="h100-fp8 is quarantined"):
        accept(make_trajectory(make_work(), 0), quarantined=frozenset({"h100-fp8"}))


def test_a_log_prob_that_is_not_a_number_is_left_to_the_loss():
    trajectory = supports(2)
    broken = np.frombuffer(trajectory.logprobs, "<f4").copy()
    broken[1] = np.nan
    accept(msgspec.structs.replace(trajectory, logprobs=broken.tobytes()))


def test_unfiltered_sampling_without_candidates_is_accepted_where_no_candidates_are_needed():
    plain = changed(candidates=None, top_p=1.0, top_k=-1)
    accept(plain, candidates_needed=False)
    with pytest.raises(RefusedError, match="candidates"):
        accept(plain)
    with pytest.raises(RefusedError, match="filtered"):
        accept(changed(candidates=None), candidates_needed=False)


def heads(own: int, logprob: float, **changes):
    """Two generated tokens of an unfiltered sampler with ids 5 (.6) and 7 (.3) as their heads."""
    whole = supports(2, q=(0.6, 0.3))
    return msgspec.structs.replace(
        whole,
        token_ids=np.full(4, own, "<i4").tobytes(),
        logprobs=np.full(2, logprob, "<f4").tobytes(),
        candidates=msgspec.structs.replace(whole.candidates, head=True),
        **({"top_p": 1.0, "top_k": -1} | changes),
    )


def test_a_head_may_lack_mass_and_the_sampled_token():
    accept(heads(5, np.log(0.6)))
    accept(heads(9, np.log(0.05)))  # the rest holds .1


@pytest.mark.parametrize(
    ("trajectory", "message"),
    [
        (heads(5, np.log(0.5)), "-0.6931 of generated token 0, but its head says -0.5108"),
        # .35 is likelier than the head's .3, which then would not be the likeliest two
        (heads(9, np.log(0.35)), "but its head says -1.2040 at most"),
        (heads(5, np.log(0.6), top_p=0.9), "candidates.head: is true, though topP or topK filtered"),
    ],
)
def test_a_head_that_cannot_be_one_is_refused(trajectory, message):
    with pytest.raises(RefusedError, match=message):
        accept(trajectory)


def test_a_head_of_nothing_or_of_too_much_is_refused():
    good = heads(5, np.log(0.6))
    empty = Candidates(np.zeros(2, "<u2").tobytes(), b"", b"", head=True)
    with pytest.raises(RefusedError, match="the head of generated token 0 is empty"):
        accept(msgspec.structs.replace(good, candidates=empty))
    much = np.tile(np.log(np.array([0.6, 0.5])).astype("<f4"), 2).tobytes()
    with pytest.raises(RefusedError, match=r"sums to 1\.1.*want at most 1"):
        accept(msgspec.structs.replace(good, candidates=msgspec.structs.replace(good.candidates, logprobs=much)))


def test_arrays_that_do_not_agree_are_refused():
    good = supports(2)
    cut = Candidates(good.candidates.counts, good.candidates.ids[:-4], good.candidates.logprobs)
    with pytest.raises(RefusedError, match="candidates: counts sum to 4, ids 3, logprobs 4"):
        accept(msgspec.structs.replace(good, candidates=cut))
    short = Candidates(good.candidates.counts[:-2], good.candidates.ids, good.candidates.logprobs)
    with pytest.raises(RefusedError, match=r"candidates\.counts: 1 of them for 2 generated tokens"):
        accept(msgspec.structs.replace(good, candidates=short))


def test_support_of_one_that_is_stored_must_be_certain():
    # counts of 1: stored, though nothing need be; its log-prob must then be 0, or a candidate is missing
    alone = supports(2, q=(1.0,), ids=(5,))
    whole = msgspec.structs.replace(alone.candidates, counts=np.ones(2, "<u2").tobytes())
    accept(msgspec.structs.replace(alone, candidates=whole))
    partial = supports(2, q=(0.6,), ids=(5,))
    missing = msgspec.structs.replace(partial.candidates, counts=np.ones(2, "<u2").tobytes())
    with pytest.raises(RefusedError, match=r"support of generated token 0 sums to 0\.6"):
        accept(msgspec.structs.replace(partial, candidates=missing))


def test_empty_support_stands_for_certainty_and_a_log_prob_that_is_not_zero_contradicts_it():
    certain = changed(
        token_ids=np.full(4, 5, "<i4").tobytes(),
        turns=turns((2, 4)),
        logprobs=np.zeros(2, "<f4").tobytes(),
        candidates=Candidates(np.zeros(2, "<u2").tobytes(), b"", b""),
    )
    accept(certain)
    with pytest.raises(RefusedError, match=r"logprobs: -0\.5000 of generated token 1, but its support says 0\.0000"):
        accept(msgspec.structs.replace(certain, logprobs=np.array([0.0, -0.5], "<f4").tobytes()))


@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
def test_a_candidate_without_a_number_is_left_to_the_loss_which_drops_its_token(bad):
    from motley_api.resources.rlrun import Algorithm
    from motley_trainer.batches import build_sequences
    from motley_trainer.recipe import recipe_of

    trajectory = supports(2)
    logprobs = np.frombuffer(trajectory.candidates.logprobs, "<f4").copy()
    logprobs[0] = bad  # of the first token's sampled candidate
    broken = msgspec.structs.replace(
        trajectory, candidates=msgspec.structs.replace(trajectory.candidates, logprobs=logprobs.tobytes())
    )
    if bad != bad:
        accept(broken)
    else:  # a probability of 0 that was drawn is a contradiction, not a missing number
        with pytest.raises(RefusedError, match=r"sums to 0\.4"):
            accept(broken)
    (sequence,) = build_sequences([broken], recipe_of(Algorithm()), step=1)
    assert sequence.coefficients.tolist() == [0.0, 1.0]
