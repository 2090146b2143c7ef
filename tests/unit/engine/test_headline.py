"""Headlines: what a person would repeat of a run."""

from __future__ import annotations

import pytest

from tvmflow.engine.builds import Build, Peer, Speedup
from tvmflow.engine.summary import headline_parts, make_headline, speedup_text

NET = Build("net", "host", verdict="verified", latency_s=1e-3, size_bytes=13_900_000)


def peer(name: str, latency_s: float, speedup: Speedup) -> Peer:
    return Peer(name, latency_s, speedup)


@pytest.mark.parametrize(
    ("speedup", "text"),
    [
        (Speedup(2.13, 2.0, 2.2, 20), "2.1 times as fast as ORT"),
        (Speedup(106.8, 100, 110, 20), "107 times as fast as ORT"),
        (Speedup(1.04, 1.01, 1.05, 20), "4% faster than ORT"),
        (Speedup(1.04, 0.99, 1.05, 20), "as fast as ORT, within the noise"),
        (Speedup(0.96, 0.95, 0.99, 20), "4% slower than ORT"),
        (Speedup(0.5, 0.45, 0.6, 20), "SLOWER: 2.0 times the time of ORT"),
        # a median of limits that are far apart would be another one in the next run
        (Speedup(20.3, 14.5, 25.4, 12), "20 times as fast as ORT (noisy: 14–25)"),
        (Speedup(0.5, 0.3, 0.6, 12), "SLOWER: 2.0 times the time of ORT (noisy: 1.7–3.3)"),
        # with few pairs, also a small difference may be noise
        (Speedup(1.1, 1.05, 1.15, 3), "as fast as ORT, within the noise"),
        (Speedup(0.9, 0.85, 0.95, 3), "as fast as ORT, within the noise"),
        (Speedup(1.5, 1.3, 1.6, 3), "1.5 times as fast as ORT"),
        # what is shown beside it must not contradict it: 12 ms and 32 ms are not "as fast as"
        (
            Speedup(2.7, 0.8, 3.1, 20),
            "the machine was too noisy to compare it with ORT (0.8 to 3.1 times as fast)",
        ),
    ],
)
def test_a_speedup_is_claimed_only_beyond_the_noise(speedup: Speedup, text: str) -> None:
    """And a slower library is called so."""
    assert speedup_text(speedup, "ORT") == text


def test_a_library_is_compared_with_its_fastest_peer() -> None:
    """Not with the one that it beats most."""
    fast = peer("ORT", 2e-3, Speedup(2.0, 1.9, 2.1, 20))
    slow = peer("PyTorch", 9e-3, Speedup(9.0, 8.0, 10.0, 20))
    build = NET._replace(peers=(slow, fast))
    assert make_headline([build]) == "net/host: 2.0 times as fast as ORT, verified, 13.9 MB"
    untuned = NET._replace(tuning_speedup=Speedup(1.5, 1.4, 1.6, 20))
    assert headline_parts(untuned)[0] == "1.5 times as fast as the same model untuned"
    assert headline_parts(NET) == ("1 ms per call", "verified", "13.9 MB")


def test_a_peer_with_other_outputs_is_no_measure() -> None:
    """It may be fast because it computes something else."""
    right = peer("ORT", 2e-3, Speedup(2.0, 1.9, 2.1, 20))
    wrong = peer("OpenVINO", 5e-4, Speedup(0.5, 0.4, 0.6, 20))._replace(differs=True)
    assert headline_parts(NET._replace(peers=(wrong, right)))[0] == "2.0 times as fast as ORT"
    assert headline_parts(NET._replace(peers=(wrong,)))[0] == "1 ms per call"


def test_bad_verdicts_stand_out() -> None:
    """Also of a library that was not made; nothing is said where nothing is known."""
    known = NET._replace(latency_s=None, accuracy=0.5)
    rejected = known._replace(verdict="rejected")
    assert make_headline([rejected]) == "net/host: REJECTED, accuracy 50.00%, 13.9 MB"
    assert headline_parts(NET._replace(verdict="rejected")) == ("REJECTED", "13.9 MB")
    assert headline_parts(NET._replace(verdict="not verified"))[1] == "NOT VERIFIED"
    assert headline_parts(Build("net", "host", problems=("it crashed",))) == ("FAILED",)
    assert make_headline([Build("net", "host")]) == make_headline([]) == ""


def test_of_several_builds_the_best_and_the_worst_are_named() -> None:
    """With the number of each verdict."""
    fast = NET._replace(peers=(peer("ORT", 2e-3, Speedup(2.0, 1.9, 2.1, 20)),))
    slow = fast._replace(target="edge", peers=(peer("ORT", 1e-3, Speedup(0.5, 0.4, 0.6, 20)),))
    wrong = (peer("ORT", 1e-3, Speedup(58.0, 57.0, 59.0, 20)),)
    rejected = NET._replace(target="bad", verdict="rejected", peers=wrong)
    assert make_headline([fast, slow, rejected]) == (
        "3 builds: 2 verified, 1 REJECTED; best: net/host, 2.0 times as fast as ORT; "
        "worst: net/edge, SLOWER: 2.0 times the time of ORT"
    )
    tuned = [
        NET._replace(target=name, tuning_speedup=Speedup(s, s, s, 20))
        for name, s in (("a", 1.5), ("b", 3.0))
    ]
    assert make_headline(tuned).endswith(
        "worst: net/a, 1.5 times as fast as the same model untuned"
    )
    assert make_headline([NET, NET]) == "2 builds: 2 verified"
