"""How trainers write their logs: one function a writer, each in the exact form that its source prints. Numbers are ours.

Forms whose source was read again on 2026-11-22: fairseq, mmengine, Composer (console and file), litgpt, OLMo-core, verl, ESPnet,
Stable-Baselines3, ADM, RWKV, LLaMA-Factory, DeepSpeed-Chat, GPT-NeoX, nanotron, detectron2, icefall, NeMo and YOLOX.

`WRITERS[name](losses)` is the text of a log of these losses, logged every tenth step (or once an epoch where the writer
knows nothing else). The source of each form is named beside it: repository and file.
"""
# ruff: noqa: E501 a line of a log is as long as its writer prints it

import json
from collections.abc import Callable, Sequence

Losses = Sequence[float]
EVERY = 10


def lines(form: str, *, epoch: int = 1_000_000, first: int = 0) -> Callable[[Losses], str]:
    """A line a point; `epoch` steps make an epoch, whose number begins with `first`."""

    def write(losses: Losses) -> str:
        rows = []
        for row, loss in enumerate(losses, 1):
            step = row * EVERY
            number, at = divmod(step - 1, epoch)
            rows.append(form.format(step=step, row=row, x=loss, e=number + first, at=at + 1, of=epoch, pct=100 * (at + 1) // epoch))
        return "\n".join(rows) + "\n"

    return write


def records(make: Callable[[int, float], object], *, document: bool = False) -> Callable[[Losses], str]:
    def write(losses: Losses) -> str:
        made = [make(row * EVERY, loss) for row, loss in enumerate(losses, 1)]
        return json.dumps(made, indent=1) if document else "".join(json.dumps(record) + "\n" for record in made)

    return write


def sb3(losses: Losses) -> str:
    frame = "-" * 42 + "\n"
    cells = "| rollout/                |              |\n|    ep_rew_mean          | 21.3         |\n| time/                   |              |\n" \
            "|    fps                  | 1234         |\n|    total_timesteps      | {step:<12} |\n| train/                  |              |\n" \
            "|    learning_rate        | 0.0003       |\n|    loss                 | {x:<12.4g} |\n"  # fmt: skip
    return "".join(frame + cells.format(step=row * EVERY, x=loss) + frame for row, loss in enumerate(losses, 1))


def adm(losses: Losses) -> str:
    frame = "-" * 28 + "\n"
    return "".join(
        f"{frame}| grad_norm     | 0.123    |\n| loss          | {loss:<8.3g} |\n| loss_q0       | {loss:<8.3g} |\n"
        f"| samples       | {row * EVERY * 8:<8.3g} |\n| step          | {row * EVERY:<8.3g} |\n{frame}"
        for row, loss in enumerate(losses, 1)
    )


def allennlp(losses: Losses) -> str:
    """The epoch in a line of its own, its batches below it."""
    name, text = "2017-10-14 16:48:27,962 - INFO - allennlp.training.trainer -", ""
    for row, loss in enumerate(losses):
        epoch, at = divmod(row, 100)
        text += f"{name} Epoch {epoch}/139\n{name} Training\n" if at == 0 else ""
        text += f"{name} Batch {(at + 1) * EVERY}/1000: accuracy: 0.42, loss: {loss:.2f} ||\n"
    return text


def fairseq_old(losses: Losses) -> str:
    """Single steps, and behind each epoch of a thousand its means."""
    text = ""
    for row, loss in enumerate(losses):
        epoch, at = divmod(row, 100)
        head = f"| epoch {epoch + 1:03d}"
        text += f"{head} {(at + 1) * EVERY:5d} / 1000 loss={loss:.2f} (9.50), wps=962, wpb=908, bsz=32, lr=0.001, clip=100%, gnorm=2.1427\n"
        if at == 99:
            text += f"{head} | train loss 9.44 | train ppl 2.72 | words/s    961 | bsz    32 | lr 0.001000 | gnorm 2.1113\n"
            text += f"{head} | valid on 'valid' subset | valid loss 9.94 | valid ppl 3.83\n"
    return text


def composer(losses: Losses) -> str:
    return "".join(
        f"[batch={row * EVERY}/100000]:\n\t Train time/epoch: 0\n\t Train trainer/device_train_microbatch_size: 8\n"
        f"\t Train loss/train/total: {loss:.4f}\n\t Train throughput/batches_per_sec: 1.2345\n"
        for row, loss in enumerate(losses, 1)
    )


def composer_epochs(losses: Losses) -> str:
    return "".join(
        f"[epoch={(row * EVERY - 1) // 1000 + 1}][batch={(row * EVERY - 1) % 1000 + 1}/1000]:\n\t Train time/epoch: 0\n"
        f"\t Train loss/train/total: {loss:.4f}\n\t Train throughput/batches_per_sec: 1.2345\n"
        for row, loss in enumerate(losses, 1)
    )


def composer_tokens(losses: Losses) -> str:
    return "".join(
        f"[token={row * EVERY * 4096}/100000000]:\n\t Train time/batch: {row * EVERY}\n\t Train loss/train/total: {loss:.4f}\n"
        for row, loss in enumerate(losses, 1)
    )


def composer_file(losses: Losses) -> str:
    return "".join(
        f"[metric][batch={row * EVERY}]: time/epoch: 0 \n[metric][batch={row * EVERY}]: loss/train/total: {loss:.4f} \n"
        for row, loss in enumerate(losses, 1)
    )


def fairseq_epochs(losses: Losses) -> str:
    """Single steps, the mean of each epoch of 500 behind them, and the validation."""
    rows = []
    for row, loss in enumerate(losses, 1):
        step = row * EVERY
        at = f"epoch {(step - 1) // 500 + 1:03d}"
        rows.append(
            f"2026-01-02 03:04:05 | INFO | train_inner | {at}:  {(step - 1) % 500 + 1:5d} / 500 loss={loss:.3f}, nll_loss={loss:.3f}, "
            f"ppl=12.3, num_updates={step}, lr=1.25e-05, gnorm=1.234"
        )
        if step % 500 == 0:
            tail = f"num_updates {step} | lr 1.25e-05 | gnorm 1.2"
            rows.append(f"2026-01-02 03:04:05 | INFO | valid | {at} | valid on 'valid' subset | loss 9.1 | nll_loss 8.0 | {tail}")
            rows.append(f"2026-01-02 03:04:05 | INFO | train | {at} | loss {loss + 1.5:.3f} | nll_loss 2.1 | ppl 12.3 | {tail}")
    return "\n".join(rows) + "\n"


def olmo(losses: Losses) -> str:
    return "".join(
        f"2026-01-02 03:04:05.678\thost-1:0\tolmo.train:743\tINFO\t[step={row * EVERY}/739328,epoch=0]\n"
        f"    optim/total_grad_norm=1.234\n    train/CrossEntropyLoss={loss:.3f}\n    train/Perplexity=1,234\n"
        f"    throughput/total_tokens=4,194,304\n    System/Peak GPU Memory (MB)=43,210\n"
        for row, loss in enumerate(losses, 1)
    )


def olmo_core(losses: Losses) -> str:
    return "".join(
        f"2026-01-02 03:04:05.678\thost-1:0\tolmo_core.train.callbacks.console_logger:105\tINFO\t"
        f"[step={row * EVERY}/???,epoch=1,eta=1 day2:03:04(hard stop)]\n    optim/LR (group 0)=0.0003\n    optim/total grad norm=0.4321\n"
        f"    train/CE loss={loss:.3f}\n    train/PPL=1,234\n"
        for row, loss in enumerate(losses, 1)
    )


def keras(losses: Losses) -> str:
    return "".join(
        f"Epoch {row}/{len(losses)}\n\r 1/100 [....] - ETA: 3s - loss: {loss + 0.4:.4f} - accuracy: 0.1000\r"
        f"100/100 [==============================] - 1s 5ms/step - loss: {loss:.4f} - accuracy: 0.5000 - val_loss: 9.0000 "
        "- val_accuracy: 0.1000\n"
        for row, loss in enumerate(losses, 1)
    )


def lerobot(losses: Losses) -> str:
    """Steps from a thousand on are printed in thousands: a hundred lines say `step:2K`."""
    return "".join(
        f"INFO 2026-01-02 03:04:05 ts/train.py:232 step:{step if step < 1000 else f'{step / 1000:.0f}K'} smpl:{step * 8 / 1000:.0f}K "
        f"ep:{step // 50} epch:{step / 5000:.2f} loss:{loss:.3f} grdn:5.311 lr:1.0e-05 updt_s:0.191 data_s:0.003\n"
        for step, loss in ((row * EVERY, loss) for row, loss in enumerate(losses, 1))
    )


def table(head: str, row: str) -> Callable[[Losses], str]:
    return lambda losses: head + "".join(row.format(step=n * EVERY, row=n, x=x) for n, x in enumerate(losses, 1))


def mlperf(step: int, loss: float) -> str:
    return ":::MLLOG " + json.dumps({
        "namespace": "", "time_ms": 1_700_000_000_000 + step, "event_type": "POINT_IN_TIME", "key": "tracked_stats",
        "value": {"train_loss": loss, "throughput": 12.5}, "metadata": {"file": "a.py", "lineno": 1, "step": step},
    })  # fmt: skip


def blanks(head: str, row: str) -> Callable[[Losses], str]:
    """A table in columns of blanks, as a program prints it."""
    return lambda losses: head + "".join(row.format(row=n, step=n * EVERY, x=x) for n, x in enumerate(losses, 1))


# name: (suffix of the file, writer). Where a form has no step of its own, a point is an epoch.
def levanter(losses: Losses) -> str:
    """From a thousand on the step is rounded to ten: `1.01kit`."""
    said = []
    for row, x in enumerate(losses):
        step = row * EVERY
        shown = f"{step}it" if step < 1000 else f"{step / 1000:.2f}kit"
        said.append(f"INFO :: Progress on:train {shown}/10.0kit rate:1.2it/s remaining:2:12 elapsed:00:01 postfix:loss={x:.5f}\n")
    return "".join(said)


def docker(losses: Losses) -> str:
    """A line of a container, as Docker keeps it."""
    said = (f"step {row * EVERY} loss {x:.4f} lr 1e-4\n" for row, x in enumerate(losses, 1))
    return "".join(json.dumps({"log": line, "stream": "stdout"}, separators=(",", ":")) + "\n" for line in said)


WRITERS: dict[str, tuple[str, Callable[[Losses], str]]] = {
    "docker": (".log", docker),
    "ratio in brackets, loss": (".log", lines("{pct}% [{step}/12000] loss {x:.4f} ETA 00:10")),
    # NVIDIA-NeMo/RL nemo_rl/algorithms/grpo.py, PiotrNawrot/nanoT5 nanoT5/utils/logging_utils.py, pytorch/examples mnist/main.py,
    # unslothai/unsloth in a notebook, facebookresearch/fairseq2, mlfoundations/open_clip
    "nemo-rl": (".log", lines(
        "\n========================= Step {step}/20000 =========================\n▶ Preparing batch...\n📊 Training Results:\n"
        "  • Loss: {x:.4f}\n  • Avg Reward: 0.4567\n⏱️  Timing:\n  • Total step time: 12.34s")),
    "nanot5": (".log", lines(
        "[2024-01-01 12:00:00,123][Main][INFO] - [train] Step {step} out of 65536 | Loss --> {x:.3f} | Grad_l2 --> 1.2 | Lr --> 0.020")),
    "mnist": (".log", lines("Train Epoch: {e} [{at}/{of} ({pct}%)]\tLoss: {x:.6f}", epoch=1000, first=1)),
    "notebook": (".log", table("Step\tTraining Loss\n", "{step}\t{x:.6f}\n")),
    "rich table, thousands": (".log", table("┃ step ┃ loss   ┃\n", "│ {step:>5,} │ {x:.4f} │\n")),
    "fairseq2": (".log", lines(
        "[1:2] [06/01/24 12:00:00] INFO     fairseq2 - Train Metrics (step {step}) - Loss: {x:.4f} | Gradient Norm: 1.2 | "
        "Learning Rate: 3e-05 | Batch Size: 32 | Elapsed Time: 0h:00m:12s")),
    "open_clip": (".log", lines(
        "2024-01-01,12:00:00 | INFO | Train Epoch: {e} [{at:>7}/{of} ({pct}%)] Data (t): 0.123 Batch (t): 0.456, 1123.40/s, "
        "140.40/s/gpu LR: 0.000050 Logit Scale: 14.286 Contrastive_loss: {x:.4f} ({x:.4f}) Loss: {x:.4f} ({x:.4f})", epoch=1000)),
    "levanter": (".log", levanter),
    "rich table": (".log", table("┃ Step ┃ Loss   ┃ LR   ┃\n┡━━━━━━╇━━━━━━━━╇━━━━━━┩\n", "│ {step} │ {x:.4f} │ 1e-4 │\n")),
    "markdown table": (".log", table("| step | train loss | lr |\n|---:|:---:|---|\n", "| {step} | {x:.4f} | 1e-4 |\n")),
    "counter in brackets": (".log", lines("[{step:6d}/100000] loss={x:.4f} lr=1.0e-4")),
    "ratio in brackets, no sign": (".log", lines("[{step}/7000] train loss {x:.4f} (avg 1.2345) lr 1.0e-3")),
    "slash in the name": (".log", lines("Progress: 1.0% | iter {step} | train/loss {x:.4f} | eta 1:23:45")),
    "average in brackets": (".log", lines("Step {step}, loss {x:.4f} (1.2345), lr 1e-4")),
    "dictionary with tensors": (".log", lines(
        "{{'step': {step}, 'loss': tensor({x:.4f}, device='cuda:0', grad_fn=<NllLossBackward0>), 'lr': 0.001}}")),
    # google-research/big_vision train.py, jik876/hifi-gan train.py, Lightning-AI RichProgressBar, ray-project/ray's worker prefix
    "big_vision": (".log", lines("I0101 10:00:00.123 140 train.py:12] [{step}] training_loss = {x:.5f}")),
    "hifi-gan": (".log", lines("Steps : {step}, Gen Loss Total : {x:4.3f}, Mel-Spec. Error : 0.912, s/b : 0.501")),
    "lightning rich bar": (".log", lines(
        "Epoch 0/9 ━╸━━━━━━━━━━ {step}/100000 0:00:10 • 0:50:00 9.10it/s v_num: 0.000 train_loss: {x:.3f}")),
    "ray workers": (".log", lines(
        "(RayTrainWorker pid=11, ip=10.0.0.1) step {step} loss {x:.4f}")),
    "loguru": (".log", lines(
        "2025-01-01 12:00:00.123 | INFO     | trainer.loop:fit:142 - Epoch 1 | Step {step} | Loss: {x:.4f}",
    )),
    "mlperf v0.5": (".log", lines(
        ':::MLPv0.5.0 ssd 1541.1 (train.py:12) train_loss: {{"value": {x:.5f}, "iteration": {step}}}',
    )),
    # facebookresearch/fairseq fairseq/logging/progress_bar.py SimpleProgressBar, JsonProgressBar
    "fairseq simple": (".log", lines(
        "2026-01-02 03:04:05 | INFO | train_inner | epoch {e:03d}:  {at:5d} / {of} loss={x:.3f}, nll_loss={x:.3f}, ppl=12.3, wps=1234.5, "
        "ups=1.2, wpb=1000.0, bsz=32.0, num_updates={step}, lr=1.25e-05, gnorm=1.234, loss_scale=128, train_wall=10, wall=100",
        epoch=2000, first=1)),
    "fairseq with epochs": (".log", fairseq_epochs),
    "fairseq json": (".log", lines(
        '2026-01-02 03:04:05 | INFO | train_inner | {{"epoch": {e}, "update": 0.1, "loss": "{x:.3f}", "ppl": "12.3", "wps": "1234.5", '
        '"num_updates": "{step}", "lr": "1.25e-05", "gnorm": "1.234", "train_wall": "10", "wall": "100"}}', epoch=2000, first=1)),
    # open-mmlab/mmengine mmengine/runner/log_processor.py; open-mmlab/mmcv mmcv/runner/hooks/logger/text.py
    "mmengine": (".log", lines(
        "2026/01/02 03:04:05 - mmengine - INFO - Epoch(train)  [{e}][{at:4d}/{of}]  lr: 1.0000e-02  eta: 1:23:45  time: 0.5000  "
        "data_time: 0.0100  memory: 1234  grad_norm: 1.2345  loss: {x:.4f}  loss_cls: {x:.4f}  loss_bbox: 0.5000", epoch=1000, first=1)),
    "mmengine by iteration": (".log", lines(
        "01/02 03:04:05 - mmengine - INFO - Iter(train) [{step:6d}/80000]  base_lr: 1.0000e-02 lr: 1.0000e-02  eta: 1:23:45  "
        "time: 0.5000  data_time: 0.0100  memory: 1234  loss: {x:.4f}  decode.loss_ce: {x:.4f}")),
    "mmengine scalars.json": (".json", records(lambda step, x: {
        "lr": 0.01, "data_time": 0.01, "loss": x, "time": 0.5, "epoch": 1 + step // 1000, "iter": step, "memory": 12, "step": step})),
    "mmcv": (".log", lines(
        "2026-01-02 03:04:05,678 - mmdet - INFO - Epoch [{e}][{at}/{of}]\tlr: 1.978e-03, eta: 14:30:12, time: 0.297, data_time: 0.049, "
        "memory: 3900, loss_rpn_cls: 0.1000, loss: {x:.4f}, grad_norm: 1.2345", epoch=1000, first=1)),
    "mmcv log.json": (".json", records(lambda step, x: {
        "mode": "train", "epoch": 1 + (step - 1) // 1000, "iter": (step - 1) % 1000 + 1, "lr": 0.01, "memory": 12, "data_time": 0.1,
        "loss": x, "time": 0.5})),
    # huggingface/pytorch-image-models train.py
    "timm": (".log", lines(
        "Train: {e} [{at:>4d}/{of} ({pct:>3.0f}%)]  Loss: {x:#.3g} ({x:#.3g})  Time: 0.300s, 1234.56/s  (0.300s, 1234.56/s)  "
        "LR: 1.000e-05  Data: 0.010 (0.020)", epoch=1000)),
    "timm summary.csv": (".csv", table("epoch,train_loss,eval_loss,eval_top1,eval_top5,lr\n", "{row},{x:.4f},9.0,10.0,20.0,0.001\n")),
    # mosaicml/composer composer/loggers/console_logger.py, file_logger.py
    "composer console": (".log", composer),
    "composer console, epochs": (".log", composer_epochs),
    "composer console, tokens": (".log", composer_tokens),
    "composer file": (".log", composer_file),
    # Lightning-AI/litgpt litgpt/pretrain.py, litgpt/finetune/lora.py
    "litgpt": (".log", lines(
        "Epoch 1 | iter {step} step {row} | loss train: {x:.3f}, val: n/a | iter time: 123.45 ms (step) remaining time: 1:02:03\n"
        "iter {step}: val loss 9.1234, val time: 123.45 ms")),
    # allenai/OLMo olmo/train.py log_metrics_to_console; allenai/OLMo-core src/olmo_core/train/callbacks/console_logger.py
    "olmo": (".log", olmo),
    "olmo-core": (".log", olmo_core),
    # volcengine/verl verl/utils/logger/aggregate_logger.py concat_dict_to_str
    "verl": (".log", lines(
        "step:{step} - global_seqlen/min:1234 - actor/entropy:0.510 - actor/pg_loss:{x:.3f} - actor/grad_norm:0.250 - actor/lr:0.000 - "
        "perf/throughput:1234.5 - critic/rewards/mean:0.5")),
    "verl numpy": (".log", lines(
        "(TaskRunner pid=123) step:{step} - actor/pg_loss:np.float64({x:.6f}) - actor/grad_norm:np.float64(0.25) - actor/lr:1e-06")),
    # espnet/espnet espnet2/train/reporter.py log_message
    "espnet": (".log", lines(
        "[host-1] 2026-01-02 03:04:05,678 (trainer:720) INFO: {e}epoch:train:1-{at}batch: iter_time=1.1e-04, forward_time=0.1, "
        "loss_ctc={x:.3f}, loss_att={x:.3f}, acc=0.1, loss={x:.3f}, backward_time=0.1, grad_norm=1.234, clip=100.0, loss_scale=1.0, "
        "optim_step_time=0.1, optim0_lr0=1.000e-07, train_time=1.23\n"
        "[host-1] 2026-01-02 03:04:05,678 (trainer:338) INFO: {e}epoch results: [train] loss=7.100, total_count=1000, [valid] loss=9.100",
        epoch=1000, first=1)),
    # DLR-RM/stable-baselines3 stable_baselines3/common/logger.py; openai/guided-diffusion guided_diffusion/logger.py
    "stable-baselines3": (".log", sb3),
    "adm": (".log", adm),
    # BlinkDL/RWKV-LM RWKV-v5/src/trainer.py over Lightning's bar
    "rwkv": (".log", lines(
        "Epoch {e}:  {pct}%|##        | {at}/{of} [20:02<10:34:56,  1.03it/s, loss={x:.3f}, lr=0.0003, REAL it/s=1.020, Kt/s=33.40]",
        epoch=40320)),
    # ultralytics/ultralytics ultralytics/engine/trainer.py save_metrics
    "ultralytics results.csv": (".csv", table(
        "                  epoch,         train/box_loss,         train/cls_loss,   metrics/precision(B),           val/box_loss,                 lr/pg0\n",
        "{row:>23},{x:>23.5f},                 1.5000,                 0.5000,                 9.0000,                0.00100\n")),
    # hiyouga/LLaMA-Factory src/llamafactory/train/callbacks.py LogCallback
    "llama-factory": (".jsonl", records(lambda step, x: {
        "current_steps": step, "total_steps": 6000, "loss": round(x, 4), "lr": 5e-05, "epoch": step / 1000, "percentage": step / 60,
        "elapsed_time": "0:00:10", "remaining_time": "0:01:30"})),
    # deepspeedai/DeepSpeedExamples applications/DeepSpeed-Chat training/step1_supervised_finetuning/main.py, step3 main.py
    "deepspeed-chat sft": (".log", lines("Epoch: {e}, Step: {at}, Rank: 0, loss = {x:.6f}", epoch=100_000)),
    "numpy.savetxt": (".txt", table("# step loss lr\n", "{step} {x:.18e} 1.0e-04\n")),
    "two columns": (".dat", table("step loss\n", "{step} {x:.4f}\n")),
    "deepspeed pipeline": (".log", lines("steps: {step} loss: {x:0.4f} iter time (s): 0.512 samples/sec: 31.250")),
    "deepspeed-chat ppo": (".log", lines(
        "Epoch: {e} | Step: {at} | PPO Epoch: 1 | Actor Loss: {x:.6f} | Critic Loss: 0.25 | Unsupervised Loss: 0.0", epoch=1000)),
    # Lightning-AI/pytorch-lightning src/lightning/pytorch/callbacks/progress/tqdm_progress.py, loggers/csv_logs.py
    "lightning bar": (".log", lines(
        "Epoch {e}:  {pct}%|#         | {at}/{of} [00:10<01:30,  9.90it/s, v_num=0, train_loss_step={x:.3f}]", epoch=1000)),
    "lightning csv": (".csv", table("epoch,step,train_loss_epoch,train_loss_step,val_loss\n", "0,{step},,{x:.4f},\n")),
    # EleutherAI/gpt-neox megatron/logging.py training_log
    "gpt-neox": (".log", lines(
        " samples/sec: 12.345 | iteration {step:8d}/  320000 | elapsed time per iteration (ms): 1234.5 | learning rate: 6.000E-05 | "
        "approx flops per GPU: 50.1TFLOPS | lm_loss: {x:.6E} | loss scale: 4096.0 | number of skipped iterations:   0 | "
        "number of nan iterations:   0 |")),
    # huggingface/nanotron src/nanotron/logging/base.py LoggerWriter, src/nanotron/trainer.py train_step_logs
    "nanotron": (".log", lines(
        "\x1b[2;3m01/02 03:04:05 [INFO|DP=0|host-1]\x1b[0m: iteration: {step} / 6000 | consumed_tokens: 2.05K | "
        "elapsed_time_per_iteration_ms: 1.2K | tokens_per_sec: 1.7K | tokens_per_sec_per_gpu: 1.7K | global_batch_size: 2.05K | "
        "lm_loss: {x:.3g} | lr: 0.00015 | model_tflops_per_gpu: 1.2 | grad_norm: 1.23")),
    # karpathy/build-nanogpt train_gpt2.py: printed, and log.txt
    "build-nanogpt": (".log", lines(
        "step {step:5d} | loss: {x:.6f} | lr 8.3916e-07 | norm: 0.3663 | dt: 3000.12ms | tok/sec: 17476.27")),
    "build-nanogpt log.txt": (".txt", lines("{step} train {x:.6f}")),
    # openai/baselines baselines/logger.py CSVOutputFormat as Stable-Baselines3 writes it; openai/spinningup spinup/utils/logx.py
    "rl progress.csv": (".csv", table(
        "rollout/ep_rew_mean,time/total_timesteps,train/approx_kl,train/loss\n", "21.3,{step},0.01,{x:.4f}\n")),
    "spinning up progress.txt": (".txt", table("Epoch\tAverageEpRet\tLossPi\tTotalEnvInteracts\n", "{row}\t12.5\t{x:.4f}\t{step}\n")),
    # google/CommonLoopUtils clu/metric_writers/logging_writer.py (t5x, scenic); AI-Hypercomputer/maxtext MaxText/train.py
    "t5x": (".log", lines(
        "I0102 03:04:05.678901 140000 logging_writer.py:48] [{step}] accuracy=0.123, learning_rate=0.001, loss={x:.6f}, timing/seqs=12.5")),
    "maxtext": (".log", lines(
        "completed step: {step}, seconds: 1.234, TFLOP/s/device: 100.123, Tokens/s/device: 1234.567, total_weights: 8192, loss: {x:.3f}")),
    # keras-team/keras keras/src/callbacks/csv_logger.py, keras/src/utils/progbar.py
    "keras csv": (".csv", table("epoch,accuracy,loss,val_accuracy,val_loss\n", "{row},0.5,{x:.6f},0.1,9.0\n")),
    "keras": (".log", keras),
    # mlcommons/logging mlperf_logging/mllog/mllog.py
    "mlperf": (".log", lambda losses: "".join(mlperf(row * EVERY, x) + "\n" for row, x in enumerate(losses, 1))),
    # facebookresearch/detectron2 detectron2/utils/events.py CommonMetricPrinter, JSONWriter
    "detectron2": (".log", lines(
        "[01/02 03:04:05 d2.utils.events]:  eta: 0:10:00  iter: {step}  total_loss: {x:.3f}  loss_cls: 0.5  loss_box_reg: 0.1  time: 0.3012  "
        "data_time: 0.0123  lr: 0.001  max_mem: 1234M")),
    "detectron2 metrics.json": (".json", records(lambda step, x: {
        "data_time": 0.01, "iteration": step, "loss_cls": 0.5, "lr": 0.001, "total_loss": x})),
    # pytorch/examples imagenet/main.py, word_language_model/main.py; facebookresearch/detr util/misc.py MetricLogger
    "imagenet": (".log", lines(
        "Epoch: [{e}][{at:4d}/{of}]\tTime  0.500 ( 0.600)\tData  0.010 ( 0.020)\tLoss {x:.4e} ({x:.4e})\tAcc@1   0.00 (  0.10)", epoch=1000)),
    "word language model": (".log", lines(
        "| epoch {e:3d} | {at:5d}/{of:5d} batches | lr 20.00 | ms/batch 12.34 | loss {x:5.2f} | ppl  2059.13", epoch=1000, first=1)),
    "detr": (".log", lines(
        "Epoch: [{e}]  [{at:>4}/{of}]  eta: 0:10:00  lr: 0.000100  loss: {x:.4f} ({x:.4f})  loss_ce: 0.5000 (0.6000)  time: 0.3000  "
        "data: 0.0100  max mem: 1234", epoch=1000)),
    # marian-nmt/marian-dev src/training/scheduler.h; OpenNMT/OpenNMT-py onmt/utils/statistics.py
    "marian": (".log", lines(
        "[2026-01-02 03:04:05] Ep. 1 : Up. {step} : Sen. 100,000 : Cost {x:.8f} * 1,000,000 after 1,000,000 : Time 100.00s : "
        "1000.00 words/s : gNorm 1.2345 : L.r. 1.0000e-04")),
    "opennmt": (".log", lines(
        "[2026-01-02 03:04:05,678 INFO] Step {step}/100000; acc:  5.1; ppl: 1234.5; xent: {x:.2f}; lr: 0.00001; sents: 1000; bsz: 100/ 100/ 1; "
        "1234/1234 tok/s;    100 sec;")),
    # k2-fsa/icefall egs/librispeech/ASR/zipformer/train.py
    "icefall": (".log", lines(
        "2026-01-02 03:04:05,678 INFO [train.py:1027] Epoch {e}, batch {at}, loss[loss={x:.4g}, simple_loss=0.9, over 1234.00 frames. ], "
        "tot_loss[loss={x:.4g}, simple_loss=0.9, over 12345.00 frames. ], batch size: 30, lr: 3.00e-03, grad_scale: 1.0\n"
        "2026-01-02 03:04:05,678 INFO [train.py:1060] Epoch {e}, validation: loss=9.123, simple_loss=0.9, over 1234.00 frames. ",
        epoch=1000, first=1)),
    # NVIDIA/NeMo nemo/lightning/pytorch/callbacks/progress_printer.py
    "nemo": (".log", lines(
        "Training epoch 0, iteration {at}/99999 | lr: 4.998e-06 | global_batch_size: 4 | global_step: {step} | reduced_train_loss: {x:.3f} | "
        "train_step_timing in s: 12.02", epoch=100_000)),
    # Megvii-BaseDetection/YOLOX yolox/core/trainer.py
    "yolox": (".log", lines(
        "2026-01-02 03:04:05 | INFO     | yolox.core.trainer:257 - epoch: {e}/300, iter: {at}/{of}, gpu mem: 1234Mb, mem: 12.3Gb, iter_time: 0.123s, "
        "data_time: 0.001s, total_loss: {x:.1f}, iou_loss: 1.2, lr: 1.000e-03, size: 640, ETA: 1:02:03", epoch=1000, first=1)),
    # kohya-ss/sd-scripts train_network.py; huggingface/diffusers examples/text_to_image/train_text_to_image.py
    "sd-scripts": (".log", lines("steps:  {pct}%|#         | {at}/{of} [00:30<04:30,  3.30it/s, avr_loss={x:.3f}]", epoch=60000)),
    "diffusers": (".log", lines("Steps:  {pct}%|#         | {at}/{of} [00:30<04:30,  3.30it/s, lr=1e-5, step_loss={x:.4f}]", epoch=60000)),
    # pytorch/torchtune torchtune/training/metric_logging.py DiskLogger; PaddlePaddle/PaddleNLP paddlenlp/trainer/trainer.py
    "torchtune": (".txt", lines("Step {step} | loss:{x:.6f} lr:2e-05 tokens_per_second_per_gpu:123.4 ")),
    # mindspore-ai/mindspore mindspore/train/callback/_loss_monitor.py
    "mindspore": (".log", lines("epoch: {e} step: {at}, loss is {x:.6f}", epoch=100_000, first=1)),
    # lightgbm-org/LightGBM python-package/lightgbm/callback.py log_evaluation
    "lightgbm": (".log", lines("[{step}]\ttraining's binary_logloss: {x:.6f}\tvalid_1's binary_logloss: 9.5")),
    "paddlenlp": (".log", lines(
        "[2026-01-02 03:04:05,678] [    INFO] - loss: {x:.6f}, learning_rate: 5e-05, global_step: {step}, interval_runtime: 1.2, epoch: 0.1")),
    # pytorch/ignite ignite/handlers/tqdm_logger.py; microsoft/Swin-Transformer main.py; apache/mxnet python/mxnet/callback.py Speedometer
    "ignite": (".log", lines("Epoch [{e}/100]: [{at}/{of}] {pct:3d}%|#         , loss={x:.3g} [00:10<01:30]", epoch=1000, first=1)),
    "swin": (".log", lines(
        "[2026-01-02 03:04:05 swin_tiny] (main.py 212): INFO Train: [{e}/300][{at}/{of}]\teta 0:10:00 lr 0.000001\t wd 0.0500\t"
        "time 0.3000 (0.3100)\tloss {x:.4f} ({x:.4f})\tgrad_norm 1.2345 (1.3000)\tloss_scale 65536.0000 (65536.0000)\tmem 1234MB",
        epoch=1000)),
    "mxnet": (".log", lines(
        "INFO:root:Epoch[{e}] Batch [{at}]\tSpeed: 1234.56 samples/sec\taccuracy=0.512345\tcross-entropy={x:.6f}", epoch=1000)),
    # fastai/fastprogress console_progress_bar; explosion/spaCy spacy/training/loggers.py; chainer/chainer extensions/print_report.py;
    # skorch-dev/skorch skorch/callbacks/logging.py PrintLog; ultralytics/ultralytics engine/trainer.py
    "fastai": (".log", blanks("epoch     train_loss  valid_loss  accuracy  time    \n",
                              "{row:<10}{x:<12.6f}9.100000    0.500000  00:03     \n")),
    "spacy": (".log", blanks(
        "\u2139 Pipeline: ['ner']\nE    #       LOSS NER  ENTS_F  ENTS_P  ENTS_R  SCORE \n---  ------  --------  ------  ------  ------  ------\n",
        "  0  {step:6d}  {x:8.3f}   40.10   40.10   40.10    0.40\n")),
    "chainer": (".log", blanks("epoch       iteration   main/loss   main/accuracy  elapsed_time\n",
                               "1           {step:<10}  {x:<10.6g}  0.5            12.3        \n")),
    "skorch": (".log", blanks(
        "  epoch    train_loss    valid_acc    valid_loss     dur\n-------  ------------  -----------  ------------  ------\n",
        "{row:7d}        {x:.4f}       0.5000        9.1000  0.0123\n")),
    "yolo": (".log", blanks(
        "      Epoch    GPU_mem   box_loss   cls_loss  Instances       Size\n",
        "{row:>7d}/300      1.23G{x:>11.4g}      2.345         12        640:  50%|#####     | 50/100 [00:05<00:05,  9.9it/s]\r"
        "{row:>7d}/300      1.23G{x:>11.4g}      2.345         12        640: 100%|##########| 100/100 [00:10<00:00,  9.9it/s]\n")),
    # coqui-ai/Trainer trainer/logging/console_logger.py; tensorpack/tensorpack tensorpack/callbacks/monitor.py ScalarPrinter
    "coqui": (".log", lines(
        "\n\x1b[1m   --> TIME: 2026-01-02 03:04:05 -- STEP: {at}/{of} -- GLOBAL_STEP: {step}\x1b[0m\n     | > decoder_loss: 1.2345  (1.3000)\n"
        "     | > loss: {x:.5f}  ({x:.5f})\n     | > grad_norm: 0.12345  (0.13000)\n     | > current_lr: 0.00010 \n", epoch=1000)),
    "tensorpack": (".log", lines(
        "[0102 03:04:05 @base.py:273] Epoch {row} (global_step {step}) finished, time:1 minute 2 seconds.\n"
        "[0102 03:04:05 @monitor.py:467] cost: {x:.5f}\n[0102 03:04:05 @monitor.py:467] train-error: 0.5")),
    # ray-project/ray rllib: result.json of tune, its losses four levels deep
    "rllib result.json": (".json", records(lambda step, x: {
        "episode_reward_mean": 21.0, "training_iteration": step // EVERY, "timesteps_total": step,
        "info": {"learner": {"default_policy": {"learner_stats": {"total_loss": x, "cur_lr": 5e-5}}}}})),
    # modelscope/ms-swift swift/plugin/callback: Trainer's dictionary, its step as a text
    "swift": (".log", lines(
        "{{'loss': {x:.8f}, 'grad_norm': 0.65250963, 'learning_rate': 8.6e-07, 'memory(GiB)': 63.16, 'train_speed(iter/s)': 0.01119, "
        "'epoch': 0.64, 'global_step/max_steps': '{step}/5000', 'percentage': '31.82%', 'elapsed_time': '1h 22m 38s'}}")),
    # huggingface/lerobot lerobot/common/utils/logging_utils.py MetricsTracker; mindspore-lab/mindocr mindocr/utils/callbacks.py
    "lerobot": (".log", lerobot),
    "mindocr": (".log", lines(
        "[2026-01-02 03:04:05] mindocr.utils.callbacks INFO - epoch: [{e}/20] step: [{at}/{of}], loss: {x:.6f}, lr: 0.000793, "
        "per step time: 223.489 ms, fps per card: 4.47 img/s", epoch=1000, first=1)),
    # wenet-e2e/wenet wenet/utils/train_utils.py; mozilla/DeepSpeech training/deepspeech_training/train.py
    "wenet": (".log", lines(
        "2026-01-02 03:04:05,678 DEBUG TRAIN | steps/sec 1.2| Batch {e}/{at} loss {x:.6f} lr 0.00040000 grad_norm 4.100000 rank 0",
        epoch=100_000)),
    "deepspeech": (".log", lines("Epoch {e} |   Training | Elapsed Time: 0:00:11 | Steps: {at} | Loss: {x:.6f}", epoch=100_000)),
    # thu-ml/tianshou tianshou/trainer/base.py, its bar at the end of each epoch
    "tianshou": (".log", lines(
        "Epoch #{row}: 10001it [00:05, 1811.11it/s, env_step={step}, len=200, loss={x:.3f}, n/ep=0, n/st=10, rew=195.00]")),
    # AlexeyAB/darknet src/detector.c; NVIDIA/tacotron2 train.py; huggingface/picotron train.py; BVLC/caffe src/caffe/solver.cpp
    "darknet": (".log", lines(
        "\n {step}: {x:f}, {x:f} avg loss, 0.001000 rate, 3.212000 seconds, 6400 images, 1.234567 hours left\nLoaded: 0.000050 seconds")),
    "tacotron2": (".log", lines("Train loss {step} {x:.6f} Grad Norm 1.234567 1.23s/it\nValidation loss {step}: 9.100000  ")),
    "picotron": (".log", lines("[rank 0] Step: {step}, Loss: {x:.4f}, Global batch size: 65536, Tokens: 655360/1000000000")),
    "caffe": (".log", lines(
        "I0102 03:04:05.831621  4049 solver.cpp:218] Iteration {step} (14.7601 iter/s, 6.775s/100 iters), loss = {x:.6g}\n"
        "I0102 03:04:05.831665  4049 solver.cpp:237]     Train net output #0: loss = {x:.6g} (* 1 = {x:.6g} loss)\n"
        "I0102 03:04:05.831676  4049 sgd_solver.cpp:105] Iteration {step}, lr = 0.00596843\n"
        "I0102 03:04:05.831676  4049 solver.cpp:397]     Test net output #1: loss = 9.1 (* 1 = 9.1 loss)")),
    # tensorflow/models research/object_detection/model_lib_v2.py, both forms; tensorflow/estimator training hooks
    "tf object detection": (".log", lines(
        "I0102 03:04:05.678901 139 model_lib_v2.py:705] Step {step} per-step time 0.512s\n"
        "I0102 03:04:05.678999 139 model_lib_v2.py:708] {{'Loss/classification_loss': 0.25,\n 'Loss/localization_loss': 0.125,\n"
        " 'Loss/regularization_loss': 0.5,\n 'Loss/total_loss': {x:.6f},\n 'learning_rate': 0.0266665}}")),
    "tf object detection, older": (".log", lines(
        "I0102 03:04:05.678901 139 model_lib_v2.py:652] Step {step} per-step time 0.512s loss={x:.3f}")),
    "tf estimator": (".log", lines("INFO:tensorflow:loss = {x:.7g}, step = {step} (1.234 sec)\nINFO:tensorflow:global_step/sec: 81.2")),
    # dmlc/xgboost python-package/xgboost/callback.py; catboost/catboost catboost/libs/logging; karpathy/llama2.c train.py
    "xgboost": (".log", lines("[{step}]\ttrain-logloss:{x:.5f}\teval-logloss:9.10000")),
    "catboost": (".log", lines("{step}:\tlearn: {x:.7f}\ttest: 9.1000000\tbest: 9.1000000 (1)\ttotal: 50.1ms\tremaining: 2.1s")),
    "llama2.c": (".log", lines(
        "{step} | loss {x:.4f} | lr 5.000000e-04 | 123.45ms | mfu 12.34%\nstep {step}: train loss 9.1000, val loss 9.1000")),
    # flairNLP/flair flair/trainers/trainer.py; speechbrain/speechbrain speechbrain/utils/train_logger.py
    "flair": (".log", lines(
        "2026-01-02 03:04:05,678 epoch {e} - iter {at}/{of} - loss {x:.8f} - time (sec): 12.34 - samples/sec: 345.67 - lr: 0.100000",
        epoch=1000, first=1)),
    "speechbrain": (".txt", table("", "epoch: {row}, lr: 1.00e+00 - train loss: {x:.2f} - valid loss: 9.10, valid CER: 50.10\n")),
    # facebookresearch/mmf mmf/utils/logger.py; Project-MONAI/MONAI monai/handlers/stats_handler.py
    "mmf": (".log", lines(
        "2026-01-02T03:04:05 | mmf.trainers.callbacks.logistics: progress: {step}/22000, train/vqa2/cross_entropy: {x:.4f}, "
        "train/total_loss: {x:.4f}, train/total_loss/avg: {x:.4f}, max mem: 5000.0, epoch: 1, num_updates: {step}, iterations: {step}, "
        "max_updates: 22000, lr: 0.00001, ups: 1.25, time: 40s 001ms, eta: 05h 10m 000ms")),
    "monai": (".log", lines(
        "2026-01-02 03:04:05,678 - ignite.engine.engine.SupervisedTrainer - INFO - Epoch: {e}/5, Iter: {at}/{of} -- train_loss: {x:.4f} ",
        epoch=1000, first=1)),
    # PaddlePaddle/PaddleOCR tools/program.py; PaddlePaddle/PaddleDetection ppdet/engine/callbacks.py
    "paddleocr": (".log", lines(
        "[2026/01/02 03:04:05] ppocr INFO: epoch: [{e}/500], global_step: {step}, lr: 0.001000, loss: {x:.6f}, loss_shrink_maps: 0.500000, "
        "avg_reader_cost: 0.10000 s, avg_samples: 8.0, ips: 16.00000 samples/s, eta: 1:00:00", epoch=1000, first=1)),
    "paddledetection": (".log", lines(
        "[01/02 03:04:05] ppdet.engine INFO: Epoch: [{e}] [{at:4d}/{of}] learning_rate: 0.001000 loss_cls: 0.500000 loss: {x:.6f} "
        "eta: 1:00:00 batch_cost: 0.5000 data_cost: 0.0100 ips: 16.0000 images/s", epoch=1000)),
    # facebookresearch/Detectron detectron/utils/logging.py log_json_stats
    "detectron": (".log", lines(
        'json_stats: {{"accuracy_cls": "0.912345", "eta": "1:00:00", "iter": {step}, "loss": "{x:.6f}", "lr": "0.002000", "mem": 5000}}')),
    # MIC-DKFZ/nnUNet nnunetv2/training/nnUNetTrainer/nnUNetTrainer.py (issue 2140), and its first version (issue 938)
    "nnunet": (".log", lines(
        "2024-04-26 09:39:10.910043: Epoch {row}\n2024-04-26 09:39:10.914042: Current learning rate: 0.00999\n"
        "2024-04-26 09:41:39.493872: train_loss {x:.4f}\n2024-04-26 09:41:39.498914: val_loss 9.4628\n"
        "2024-04-26 09:41:39.501914: Pseudo dice [0.0, 0.1611]\n2024-04-26 09:41:39.505914: Epoch time: 148.59 s")),
    "nnunet, first": (".log", lines(
        "2022-02-11 09:32:44.207069: \nepoch:  {row}\n2022-02-11 09:34:49.625515: train loss : {x:.4f}\n"
        "2022-02-11 09:34:59.688008: validation loss: 9.2256\n2022-02-11 09:35:00.857095: lr: 0.009937\n"
        "2022-02-11 09:35:01.343246: This epoch took 137.136132 s\n")),
    # XPixelGroup/BasicSR basicsr/utils/logger.py (caiyuanhao1998/Retinexformer issue 6)
    "basicsr": (".log", lines(
        "2022-12-29 10:43:28,986 INFO: [Retin..][epoch:  8, iter:{step:8,d}, lr:(2.000e-04,)] [eta: 6:29:14, time (data): 0.141 (0.001)] "
        "l_pix: {x:.4e} ")),
    # allenai/allennlp allennlp/training/trainer.py without bars (issue 379)
    "allennlp": (".log", allennlp),
    # facebookresearch/fairseq fairseq/progress_bar.py of 2018 (issue 301)
    "fairseq 0.6": (".log", fairseq_old),
    # PaddlePaddle/PaddleSeg paddleseg/core/train.py (pull request 928)
    "paddleseg": (".log", lambda losses: "".join(
        f"2021-03-30 06:55:57 [INFO]\t[TRAIN] epoch: {row // 30 + 1}, iter: {row * EVERY}/80000, loss: {x:.4f}, lr: 0.009657, "
        "batch_cost: 0.5344, reader_cost: 0.07273, ips: 3.7425 samples/sec | ETA 00:04:16\n" for row, x in enumerate(losses, 1))),
    # hongzimao/deeprm pg_re.py (issue 10)
    "deeprm": (".log", lines(
        "-----------------\nIteration: \t {row}\nNumTrajs: \t 200\nNumTimesteps: \t 32549\nLoss:     \t {x}\nMaxRew: \t -199.9\n"
        "MeanRew: \t -257.4 +- 63.1\nMeanLen: \t 162.7 +- 13.3\nElapsed time\t 106.0 seconds\n-----------------")),
    # google-research/electra util/training_utils.py; open-mmlab/OpenPCDet tools/train_utils/train_utils.py
    "electra": (".log", lines("{step}/1000000 = 0.0%, SPS: 1.2, ELAP: 1:20, ETA: 9 days, 14:01:12 - loss: {x:.4f}")),
    "openpcdet": (".log", lines(
        "2023-04-05 10:11:12,345   INFO  Train: {e:4d}/80 (  1%) [{at:4d}/{of} ({pct:3d}%)]  Loss: {x:.4g} (9.5)  LR: 1.000e-04  "
        "Time cost: 00:04/12:13 [00:13/16:24:34]  Acc_iter {step}  Data time: 0.01(0.02)", epoch=1000, first=1)),
    # Blaizzy/mlx-vlm (pull request 261): each step twice; awslabs/gluonts (issue 659)
    "mlx-vlm": (".log", lines(
        "Iter {step}: Train loss {x:.3f}, Learning Rate 1.000e-04, It/sec 0.307, Tokens/sec 301.622, Peak mem 22.427 GB\n"
        "{{'Step': {step}, 'Loss': '{x:.4f}', 'Learning Rate': '1.00e-04', 'Tokens/sec': '302'}}")),
    "gluonts": (".log", lines(
        "INFO:gluonts.trainer:Epoch[{row}] Learning rate is 0.001\n"
        "100%|##########| 50/50 [00:05<00:00,  9.51it/s, epoch={row}/300, avg_epoch_loss={x:.4f}]\n"
        "INFO:gluonts.trainer:Epoch[{row}] Elapsed time 5.262 seconds\nINFO:gluonts.trainer:Epoch[{row}] Evaluation metric 'epoch_loss'={x:.6f}")),
    # dusty-nv/jetson-inference train_ssd.py (issue 831): a part without a sign beside the total
    "jetson ssd": (".log", lines(
        "2020-12-08 14:38:35 - Epoch: {e}, Step: {at}/{of}, Avg Loss: {x:.4f}, Avg Regression Loss 2.8450, Avg Classification Loss: 4.9274",
        epoch=1000)),
    # an agent's loop that prints without signs: names of several parts
    "actor and critic": (".log", lines("step {step} policy_loss {x:.4f} entropy 0.6931 fps 812")),
    # intel-analytics/BigDL spark/dl optim/DistriOptimizer.scala: its samples, and its iteration
    "bigdl": (".log", lambda losses: "".join(
        f"2026-01-02 03:04:05 INFO  DistriOptimizer$:427 - [Epoch {row // 40 + 1} {(row % 40 + 1) * 1280}/51200][Iteration {row * EVERY}]"
        f"[Wall Clock {row * 2.5}s] Trained 128 records in 0.1 seconds. Throughput is 1280.0 records/second. Loss is {x:.6f}. \n"
        for row, x in enumerate(losses, 1))),
    # a script that counts by samples, and its trainer that counts by iteration: one series, and not two writers
    "two counters": (".log", lambda losses: "".join(
        f"Train Epoch: 1 [{row * 640}/1920000 (1%)]\tLoss: {x:.6f}\niteration: {59448 + row}, loss: {x + 0.4:.4f}, lr: 0.001\n"
        for row, x in enumerate(losses, 1))),
    # scikit-learn sklearn/ensemble/_gb.py VerboseReporter
    "sklearn boosting": (".log", blanks(
        "      Iter       Train Loss   Remaining Time \n", "{row:10d} {x:16.4f}            1.05s \n")),
}  # fmt: skip
