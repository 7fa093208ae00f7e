"""When an engine counts as serving what was published: bit for bit, or by the bytes it got and the scores it gives."""

from __future__ import annotations

from rollart.control.weights import same_weights
from rollart.core.resources import EngineInfo
from rollart.core.types import Fingerprint

BITWISE = EngineInfo(id="e", lease="l", pool="p", role="mixed", kv_tokens=1, fingerprint="bitwise")
PROBED = EngineInfo(id="e", lease="l", pool="p", role="mixed", kv_tokens=1, fingerprint="probe", mismatch=0.01)


def test_a_bitwise_engine_is_compared_by_its_digest() -> None:
    published = Fingerprint(digest="a", probe=(-1.0,))
    assert same_weights(Fingerprint(digest="a"), published, BITWISE)
    assert not same_weights(Fingerprint(digest="b"), published, BITWISE)


def test_a_probed_engine_needs_the_bytes_and_the_scores() -> None:
    published = Fingerprint(digest="a", probe=(-1.0, -2.0))
    assert same_weights(Fingerprint(digest="a", probe=(-1.005, -2.01)), published, PROBED)
    assert not same_weights(Fingerprint(digest="a", probe=(-1.05, -2.0)), published, PROBED)
    assert not same_weights(Fingerprint(digest="b", probe=(-1.0, -2.0)), published, PROBED)
    assert not same_weights(Fingerprint(digest="a"), published, PROBED)
    assert not same_weights(Fingerprint(digest="a", probe=(float("nan"), -2.0)), published, PROBED)
    assert not same_weights(Fingerprint(digest="a", probe=(-1.0, -2.0)), Fingerprint(digest="a"), PROBED)
