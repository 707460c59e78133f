"""What the candidates of a token cost on the wire, and how fast they are written and read: beside dense [n, 128] arrays.

    python benchmarks/records.py [--tokens 200000]

Sets as top-p leaves them (benchmarks/supports.py). Ours: counts, ids and log-probs as motley_api.records.Candidates, in msgpack, raw and
as sent (zstd level 1, as rollout workers do). Dense: int32 [n, 128] and float32 [n, 128], padded, raw and with the same zstd. Times are
CPU time on one core, the least of the repeats. The last line of the output is JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import msgspec
import numpy as np
import supports
import torch
import zstandard
from motley_api import records
from motley_trainer.losses import build_support

VOCABULARY, WIDTH, ZSTD_LEVEL = 151_936, 128, 1


def least_seconds(action: Callable[[], object], repeats: int = 3) -> float:
    times = []
    for _ in range(repeats):
        started = time.process_time()
        action()
        times.append(time.process_time() - started)
    return min(times)


def dense_arrays(
    counts: np.ndarray, ids: np.ndarray, logq: np.ndarray, sampled: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """int32 [n, 128] and float32 [n, 128] with the same content; -1 and 0 where there is no candidate."""
    n = counts.size
    wide_ids, wide_logq = np.full((n, WIDTH), -1, "<i4"), np.zeros((n, WIDTH), "<f4")
    single = counts == 0
    wide_ids[single, 0] = sampled[single]
    token = np.repeat(np.arange(n), counts)
    column = np.arange(token.size) - np.repeat(np.cumsum(counts) - counts, counts)
    wide_ids[token, column], wide_logq[token, column] = ids, logq
    return wide_ids, wide_logq


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=200_000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    counts, ids, logq, sampled = supports.ragged(np.random.default_rng(7), options.tokens, VOCABULARY)
    size = np.maximum(counts.astype(np.int64), 1)
    zstd = zstandard.ZstdCompressor(level=ZSTD_LEVEL)

    def encode() -> bytes:
        return records.encode(
            records.Candidates(
                counts.astype("<u2").tobytes(), ids.astype("<u4").tobytes(), logq.astype("<f4").tobytes()
            )
        )

    def decode() -> object:
        """Down to what the loss takes."""
        got = msgspec.msgpack.decode(wire, type=records.Candidates)
        return build_support(
            torch.from_numpy(sampled),
            torch.zeros(options.tokens),
            torch.from_numpy(np.frombuffer(got.counts, "<u2").astype(np.int64)),
            torch.from_numpy(np.frombuffer(got.ids, "<u4").astype(np.int64)),
            torch.from_numpy(np.frombuffer(got.logprobs, "<f4").copy()),
        )

    wire = encode()
    assert_round_trip(decode(), counts, ids, logq, sampled)
    wide_ids, wide_logq = dense_arrays(counts.astype(np.int64), ids, logq, sampled)
    dense = wide_ids.tobytes() + wide_logq.tobytes()
    packed, dense_packed = zstd.compress(wire), zstd.compress(dense)
    rows = {
        "motley": (len(wire), least_seconds(encode), least_seconds(decode)),
        "motley, zstd": (len(packed), least_seconds(lambda: zstd.compress(encode())), None),
        "dense [n, 128]": (len(dense), least_seconds(lambda: wide_ids.tobytes() + wide_logq.tobytes()), None),
        "dense [n, 128], zstd": (len(dense_packed), least_seconds(lambda: zstd.compress(dense)), None),
    }
    print(
        f"{options.tokens} tokens; candidates a token: mean {size.mean():.2f}, one {np.mean(size == 1):.0%}, at most {size.max()}"
    )
    print(f"{'':22} {'bytes/token':>12} {'encode Mtok/s':>14} {'decode Mtok/s':>14}")
    for name, (size_bytes, encode_s, decode_s) in rows.items():
        each = size_bytes / options.tokens
        decoded = f"{options.tokens / decode_s / 1e6:14.2f}" if decode_s else f"{'':14}"
        print(f"{name:22} {each:12.1f} {options.tokens / encode_s / 1e6:14.2f} {decoded}")
    print(
        json.dumps(
            {
                "bytesRatioVsDense": round(len(wire) / len(dense), 4),
                "bytesRatioVsDenseZstd": round(len(packed) / len(dense_packed), 4),
                "timesSmallerThanDense": round(len(dense) / len(wire), 1),
                "bytesPerToken": round(len(wire) / options.tokens, 2),
                "encodeTokensPerSecond": round(options.tokens / rows["motley"][1]),
                "decodeTokensPerSecond": round(options.tokens / (rows["motley"][2] or 1.0)),
            }
        )
    )


def assert_round_trip(
    support: object, counts: np.ndarray, ids: np.ndarray, logq: np.ndarray, sampled: np.ndarray
) -> None:
    stored = np.repeat(counts > 0, np.maximum(counts.astype(np.int64), 1))
    assert np.array_equal(support.ids_C.numpy()[stored], ids)  # type: ignore[attr-defined]
    assert np.array_equal(support.logq_C.numpy()[stored], logq)  # type: ignore[attr-defined]
    assert np.array_equal(support.ids_C[support.chosen_N].numpy(), sampled)  # type: ignore[attr-defined]


if __name__ == "__main__":
    main()
