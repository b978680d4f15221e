"""Measures the streaming reader: rows per second and memory, for growing folders of rollouts.

    python scripts/bench_reader.py [--rows 10000 100000 1000000] [--kind parquet] [--repeat 1]

A row has 64 prompt tokens, 192 response tokens and their log-probs. The folder repeats one shard of
10,000 rows through hard links, so a million rows need the disk space of ten thousand; the page
cache then holds the files, as a reader that is not bound by the disk would find them. Memory is the
growth of the process's resident set while reading (its maximum, in MiB).
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import resource
import tempfile
import time
from pathlib import Path

import numpy as np

SHARD_ROWS = 10_000
PROMPT, RESPONSE = 64, 192


def write_shard(path: Path) -> None:
    """Writes one shard; the file's suffix says how."""
    import pyarrow
    import pyarrow.parquet

    rng = np.random.default_rng(0)
    columns = {
        "prompt_ids": list(rng.integers(0, 150_000, (SHARD_ROWS, PROMPT), dtype=np.int32)),
        "response_ids": list(rng.integers(0, 150_000, (SHARD_ROWS, RESPONSE), dtype=np.int32)),
        "rollout_log_probs": list(-rng.random((SHARD_ROWS, RESPONSE), dtype=np.float32)),
        "reward": rng.random(SHARD_ROWS),
        "group_id": np.arange(SHARD_ROWS) // 8,
    }
    table = pyarrow.table(columns)
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(table, path, row_group_size=SHARD_ROWS)
        return
    import json

    with path.open("w") as file:
        for record in table.to_pylist():
            record["rollout_log_probs"] = [round(x, 4) for x in record["rollout_log_probs"]]
            file.write(json.dumps(record) + "\n")


def read(folder: Path, rows: int, answers: multiprocessing.SimpleQueue) -> None:
    """Reads all rows in a process of its own, so that its memory is this run's."""
    import pyarrow

    from megatron_rl_loss.rollouts.stream import RolloutStream

    pyarrow.set_cpu_count(2)
    stream = RolloutStream(folder, shuffle_seed=0, vocab_size=150_000)
    stream.take(2_000)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    stream = RolloutStream(folder, shuffle_seed=0, vocab_size=150_000)
    start = time.perf_counter()
    tokens = 0
    for _ in range(rows // 1_000):
        tokens += sum(r.num_tokens for r in stream.take(1_000, whole_groups=True))
    seconds = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert tokens == rows * (PROMPT + RESPONSE)
    answers.put((rows / seconds, before / 1024, (after - before) / 1024))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--kind", choices=("parquet", "jsonl"), default="parquet")
    parser.add_argument("--repeat", type=int, default=1)
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    print(f"{'rows':>9} {'rows/s':>9} {'MiB before':>10} {'MiB more':>9}")
    with tempfile.TemporaryDirectory() as work:
        shard = Path(work) / f"shard.{options.kind}"
        write_shard(shard)
        for rows in options.rows:
            folder = Path(work) / str(rows)
            folder.mkdir()
            for i in range(rows // SHARD_ROWS):
                os.link(shard, folder / f"{i:05d}.{options.kind}")
            for _ in range(options.repeat):
                answers = context.SimpleQueue()
                process = context.Process(target=read, args=(folder, rows, answers))
                process.start()
                rate, before, more = answers.get()
                process.join()
                print(f"{rows:>9} {rate:>9.0f} {before:>10.0f} {more:>9.0f}", flush=True)


if __name__ == "__main__":
    main()
