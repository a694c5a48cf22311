"""Sentences that try to be talked round, and true ones: what was not understood is never SUPPORTED."""

import time

import pytest

from chronicle.audit import open_evidence
from chronicle.audit.claims import ClaimVerdict, judge_claim
from chronicle.audit.evidence import read_evidence
from chronicle.cli.audit import overall
from chronicle.journal import JournalWriter, read_journal
from chronicle.launch.record import seal_file
from chronicle.metrics.log import MetricsWriter
from chronicle.paths import RunPaths

FALSE = """
trained using eight A100s
trained on imagenet
trained a billion-parameter model on openwebtext
trained a two billion parameter model
training ran on sixteen GPUs
trained on four H100s
trained on hundreds of GPUs
trained on many GPUs across several nodes
multi-node training of a 1.2B model
trained on 4 GPUs per node
trained on 4 GPUs each on two nodes
trained on at least five GPUs
trained on more than 4 GPUs
trained on half a dozen A100s
trained on a cluster of A100s
trained on TPUs
trained on 4 TPUs
trained for three thousand steps
trained for 3k steps
trained for over 2,000 steps and still running
trained for millions of steps
trained to convergence on 4 GPUs
trained until it converged
trained successfully on 4 A100s without any crash
trained without interruption on 4 GPUs
trained at 1.5M tokens/s
262,144,000 tokens per epoch
262,144,000 tokens a second
trained on a trillion tokens
trained on 262 billion tokens
trained on 262M unique tokens
trained on 540 GB of text
trained on 540 GiB of WikiText-103
trained on 80 GB GPUs with 80 GB of memory
trained in fp16
trained in pure bf16 with fp32 master weights
trained with FSDP2
trained with ZeRO-3
trained with DeepSpeed
trained with DDP and tensor parallelism
trained with gradient checkpointing on 4 GPUs
1.2B trainable parameters
1.2B active parameters
trained 1.2B with MoE
a 1.3B model trained on WikiText-103
a >1.3B model
final loss of 2.95
final loss 2.9
validation loss of 3.1
test loss of 3.1 on WikiText-103
loss of 2.95
loss below 3.0
best loss 2.5
trained for 12 hours
trained for two days
trained from scratch with seed 42
trained with batch size 512 on 4 GPUs
trained with lr 3e-4
state-of-the-art loss of 3.1
nobody trained it on 4 GPUs
trained on 4 GPUs or 8 GPUs
trained on 2 of 4 GPUs
auf acht GPUs trainiert
trained on WikiText-103 and C4
trained on WikiText-103 deduplicated
trained on cleaned WikiText-103
trained twice on 4 GPUs
only rank 0 trained on WikiText-103
trained on 4 idle GPUs
trained a 1.2B model from Llama weights
trained for 4 GPU-hours
trained on up to 1000 GPUs
an 8-way DDP run on 4 GPUs
a pair of GPUs trained it
1.2B parameters each
loss of 3.1 at step 500
at step 500, a final loss of 3.1
lowest loss of 2.95 at step 2000
the loss was 7.1 after two hours
262M tokens by step 1000
two hours for the first 1,000 steps
trained on WikiText-103, which has 256,000 samples
256,000 samples in WikiText-103
trained over eight GPUs
after 3,000 steps
not fewer than 5 GPUs
1,508.6M parameters
2000 steps × 4
""".strip().splitlines()

TRUE = """
trained 1.21B on 4 GPUs on WikiText-103
trained using four A100s
trained on four GPUs
trained on 4 GPUs
trained on 4 A100 GPUs
trained on 4x NVIDIA A100 GPUs
trained on at least 4 GPUs
trained on fewer than 8 GPUs
trained on between 2 and 8 GPUs
multi-GPU training
trained on multiple GPUs
trained on several GPUs
trained on GPUs
trained on A100s
trained with 4 ranks
trained with four processes
trained on one node
trained on a single node
trained on a single machine
1,208,606,722 parameters
1.21B parameters
1.2B parameters
about 1.2B parameters
roughly 1.2 billion parameters
a 1.2 billion parameter model
a 1.2B-parameter model
over 1B parameters
more than a billion parameters
between 1B and 1.5B parameters
under 2B parameters
a 1B+ model
2,000 steps
two thousand steps
2k steps
trained for 2000 optimizer steps
trained to step 2000
reached step 1500
at least 1,000 steps
2000 updates
256,000 samples
262M tokens
262,144,000 tokens
about 262 million tokens
over a quarter billion tokens
540 MB of text
read 540 MB of WikiText-103
trained on WikiText-103
trained on the WikiText-103 dataset
dataset: WikiText-103
trained in bf16
trained in bfloat16
trained with DDP
trained with DistributedDataParallel
loss of 3.1
final loss 3.10
last loss 3.1
best loss 2.95
lowest loss was 2.95
loss down to 2.95
trained for 2 hours
trained for two hours
120 minutes
trained in bf16 with DDP on 4 A100s for 2,000 steps
the model was trained on the corpus WikiText-103 using DDP
trained successfully
trained on SLURM
trained on Linux with 4 GPUs
the run finished on 4 GPUs
""".strip().splitlines()
NOT_OF_THE_RUN = """
trained over 4 GPUs
data-parallel over four A100s
saved every 100 steps
a warm-up of 100 steps
initial loss 7.1
the loss was 3.1 after 90 minutes
checkpoint every 30 minutes
a context of 1024 tokens
a batch has 131,072 tokens
batches of 128 samples
a corpus of 103M tokens
28,475 samples in the dataset
rank 0 read 64,000 samples
1,000 steps took one hour
131M tokens after 1,000 steps
4 of 16 GPUs in the cluster
the node has 8 GPUs and four were used
an embedding of 50M parameters
1,21B Parameter
""".strip().splitlines()
TRUE += """
loss 6.1 at step 503
loss of 6.1 at step 500
at step 1000, a loss of 5.1
after 1,999 steps the loss was 3.102
best loss of 2.95 at step 1950
262M tokens by step 2000
after 100M tokens
the model has 1,208.6M parameters
trained on not less than 4 GPUs
trained on exactly four GPUs
""".strip().splitlines()
NOT_YET_SUPPORTED = {"trained on several GPUs", "trained successfully", "trained on SLURM", "trained on Linux with 4 GPUs"}
NOT_YET_SUPPORTED |= {"the run finished on 4 GPUs", "read 540 MB of WikiText-103"}


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    paths = RunPaths(tmp_path_factory.mktemp("claims") / "demo")
    record(paths, 1)
    return paths


def record(paths, number, *, start=0, steps=2000, ranks=4, sealed=True):
    for rank in range(ranks):
        evidence = open_evidence({"CHRONICLE_LAUNCH_DIR": str(paths.launch_dir(number)), "RANK": str(rank)})
        device = {"kind": "cuda", "id": f"GPU-{rank}", "name": "NVIDIA A100-SXM4-80GB"}
        evidence.process(world_size=ranks, device=device, wrapper="DistributedDataParallel", precision="bf16")
        evidence.model(logical=1_208_606_722, counted=1_208_606_722, local=1_208_606_722)
        counts = {"samples": 256_000, "tokens": 262_144_000, "bytes": 540_000_000}
        share = {key: value // ranks for key, value in counts.items()}
        evidence.data(step=steps, **share, dataset="WikiText-103", dataset_bytes=540_000_000, distinct_samples=28_475)
        evidence.end(step=steps)
    with MetricsWriter(paths.metrics_path(number)) as log:
        for step in range(start + 1, steps + 1):
            log.write(step, {"loss": 2.95 if step == steps - 50 else 3.1 + 0.002 * (steps - step)})
    with JournalWriter(paths) as writer:
        writer.append("launch.start", launch=number, data={"host": "h"})
        end = {"exit_code": 0, "last_step": steps, "start_step": start, "duration_seconds": 7200.0}
        files = [*sorted((paths.launch_dir(number) / "evidence").iterdir()), paths.metrics_path(number)]
        writer.append("launch.end", launch=number, data=end | {"sealed": [seal_file(paths, path) for path in files if sealed]})


def verdict(paths, sentence):
    judged = judge_claim(sentence, read_evidence(paths, read_journal(paths)))
    return overall(judged) if judged else None


@pytest.mark.parametrize("sentence", FALSE)
def test_no_evasive_sentence_is_supported(paths, sentence):
    assert verdict(paths, sentence) is not ClaimVerdict.SUPPORTED


@pytest.mark.parametrize("sentence", TRUE)
def test_no_true_sentence_is_contradicted(paths, sentence):
    found = verdict(paths, sentence)
    assert found is (ClaimVerdict.UNSUPPORTED if sentence in NOT_YET_SUPPORTED else ClaimVerdict.SUPPORTED)


@pytest.mark.parametrize("sentence", NOT_OF_THE_RUN)
def test_a_number_that_may_be_of_something_else_or_of_another_moment_is_not_contradicted(paths, sentence):
    assert verdict(paths, sentence) is ClaimVerdict.UNSUPPORTED


def test_the_part_that_was_not_understood_is_quoted(paths):
    judged = judge_claim("trained to convergence on 4 GPUs", read_evidence(paths, read_journal(paths)))
    assert [(one.statement.text, one.verdict.value) for one in judged] == [
        ("4 GPUs", "SUPPORTED"), ("trained", "SUPPORTED"), ("convergence", "UNSUPPORTED")
    ]


def test_evidence_whose_seal_is_broken_supports_nothing(tmp_path):
    paths = RunPaths(tmp_path / "demo")
    record(paths, 1)
    assert verdict(paths, "1.21B parameters") is ClaimVerdict.SUPPORTED
    for file in (paths.launch_dir(1) / "evidence").iterdir():
        file.write_text(file.read_text().replace("1208606722", "7000000000"))
    assert verdict(paths, "7B parameters") is ClaimVerdict.UNSUPPORTED
    (judged,) = judge_claim("7B parameters", read_evidence(paths, read_journal(paths)))
    assert "has changed" in judged.message and "supports nothing" in judged.message


def test_a_launch_of_the_lineage_without_a_record_leaves_it_unsupported(tmp_path):
    paths = RunPaths(tmp_path / "demo")
    record(paths, 1)
    with MetricsWriter(paths.metrics_path(2)) as log:
        for step in range(2001, 2101):
            log.write(step, {"loss": 3.0})
    with JournalWriter(paths) as writer:
        time.sleep(0.002)
        writer.append("launch.start", launch=2, data={"host": "h"})
        writer.append("launch.end", launch=2, data={"exit_code": 0, "last_step": 2100, "start_step": 2000})
    assert read_evidence(paths, read_journal(paths)).kept == (1, 2)
    assert verdict(paths, "trained on 4 GPUs") is ClaimVerdict.UNSUPPORTED


def test_a_rank_that_recorded_nothing_is_not_passed_over(tmp_path):
    paths = RunPaths(tmp_path / "demo")
    record(paths, 1, sealed=False)
    (paths.launch_dir(1) / "evidence" / "rank-3.jsonl").unlink()
    assert verdict(paths, "trained on 3 GPUs") is ClaimVerdict.UNSUPPORTED
    assert verdict(paths, "256,000 samples") is ClaimVerdict.UNSUPPORTED
