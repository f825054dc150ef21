"""The training keys of an Axolotl configuration: batch, optimizer, schedule, and what only ``ndbench train`` reads."""

from __future__ import annotations

from typing import Any

from ndbench.importing.findings import Findings

BENCHMARK_STEPS = 30
"""Steps of ``training=gpu``."""

ADAMW = ("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused", "adamw_torch_xla", "optimi_adamw")
"""AdamW with 32-bit states, by its names in transformers and Axolotl."""

SCHEDULES = {
    "constant": "constant",
    "constant_with_warmup": "constant",
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
    "warmup_stable_decay": "wsd",
}

_NO_COST = "it does not change what a step costs"


def translate_batch(found: Findings, batch_ranks: int) -> None:
    length = found.whole("sequence_len", least=2)
    if length is None:
        found.assumed("sequence_len", {"training.sequence_length": 512}, "Axolotl's default")
    else:
        found.translated("sequence_len", {"training.sequence_length": length})
    micro = found.whole("micro_batch_size") or 1
    count = found.whole("gradient_accumulation_steps")
    total = found.whole("batch_size")
    if count is None and total is not None:
        if total % micro:
            raise ValueError(f"{found.path}: batch_size {total} is not a multiple of micro_batch_size {micro}")
        count = total // micro
    count = count or 1
    batch = {"training.global_batch_size": micro * count * batch_ranks}
    sum_of = f"micro_batch_size {micro} x {count} accumulated x {batch_ranks} data ranks"
    if "micro_batch_size" in found:
        found.translated("micro_batch_size", {"training.micro_batch_size": micro})
    else:
        found.assumed("micro_batch_size", {"training.micro_batch_size": micro}, "Axolotl's default")
    for key in ("gradient_accumulation_steps", "batch_size"):
        found.translated(key, batch, sum_of)
    if not {"gradient_accumulation_steps", "batch_size"} & set(found.values):
        found.assumed("gradient_accumulation_steps", batch, f"Axolotl's default: {sum_of}")
    found.overrides |= batch
    if found.flag("train_on_inputs") is False:
        found.lost("train_on_inputs", "all labels count, or as many as data.valid_fraction says")
    packing = found.flag("sample_packing")
    if packing:
        found.lost(
            "sample_packing",
            "a benchmark's sequences are full and of one document: as many tokens a step, more attention; on text: "
            "data.documents=packed",
        )
    elif packing is not None:
        found.lost("sample_packing", "a benchmark's sequences are full, never padded; on text: data.documents=padded")


def translate_optimizer(found: Findings) -> None:
    name = (found.text("optimizer") or "adamw_torch_fused").lower()
    if name == "sgd":
        found.translated("optimizer", {"training.optimizer": "sgd"})
    elif name in ADAMW:
        found.translated("optimizer", {"training.optimizer": "adamw"}, "torch's fused AdamW, 32-bit states")
    else:
        why = "ndbench has adamw and sgd, or a dotted path to a torch optimizer; 32-bit AdamW is taken: memory differs"
        found.lost("optimizer", why, {"training.optimizer": "adamw"})
    if "optimizer" not in found:
        found.assumed("optimizer", {"training.optimizer": "adamw"}, "Axolotl's default, adamw_torch_fused")
    if (rate := found.number("learning_rate")) is not None:
        found.translated("learning_rate", {"training.learning_rate": rate})
    for key, name, default in (
        ("weight_decay", "training.weight_decay", 0.0),
        ("max_grad_norm", "training.max_grad_norm", 1.0),
    ):
        value = found.number(key)
        if value is None:
            found.assumed(key, {name: default}, "the default of transformers' trainer")
        else:
            found.translated(key, {name: None if key == "max_grad_norm" and value == 0 else value})
    first, second = found.number("adam_beta1"), found.number("adam_beta2")
    betas: dict[str, Any] = {"training.betas": [0.9 if first is None else first, 0.999 if second is None else second]}
    found.translated("adam_beta1", betas)
    found.translated("adam_beta2", betas)
    if first is None and second is None and name != "sgd":
        found.assumed("adam_beta1, adam_beta2", betas, "the defaults of transformers' trainer")
    if (epsilon := found.number("adam_epsilon")) is not None:
        if epsilon == 1e-8:
            found.understood("adam_epsilon", "torch's default, here too")
        else:
            found.lost("adam_epsilon", f"it is 1e-8 here; {_NO_COST}")


def translate_schedule(found: Findings) -> None:
    name = (found.text("lr_scheduler") or "cosine").lower()
    if name in SCHEDULES:
        found.translated("lr_scheduler", {"training.schedule": SCHEDULES[name]})
    else:
        found.lost(
            "lr_scheduler",
            f"no such schedule here, the rate stays constant; {_NO_COST}",
            {"training.schedule": "constant"},
        )
    if "lr_scheduler" not in found:
        found.assumed("lr_scheduler", {"training.schedule": "cosine"}, "Axolotl's default")
    ratio_keys = ("cosine_min_lr_ratio", "lr_scheduler_kwargs.min_lr_rate")
    for key in ratio_keys:
        if (least := found.number(key)) is not None:
            found.translated(key, {"training.min_learning_rate_ratio": least})
    rate, lowest = found.number("learning_rate"), found.number("lr_scheduler_kwargs.min_lr")
    if rate and lowest is not None:
        found.translated("lr_scheduler_kwargs.min_lr", {"training.min_learning_rate_ratio": lowest / rate})
    steps = found.whole("max_steps")
    if steps is not None:
        found.translated(
            "max_steps", {"training.steps": steps}, f"a benchmark takes {BENCHMARK_STEPS} steps", train=True
        )
        found.understood("num_epochs", "max_steps is given, and counts in Axolotl too")
    warmup, ratio = found.whole("warmup_steps", least=0), found.number("warmup_ratio")
    if warmup is not None:
        found.translated("warmup_steps", {"training.warmup_steps": warmup})
    elif ratio is not None:
        if not 0 <= ratio <= 1:
            raise ValueError(f"{found.path}: warmup_ratio is {ratio}, expected a part between 0 and 1")
        why = f"of the {BENCHMARK_STEPS} steps of a benchmark"
        if steps is not None:
            found.train["training.warmup_steps"] = round(ratio * steps)
            why += f"; {round(ratio * steps)} of the {steps} of ndbench train"
        found.translated("warmup_ratio", {"training.warmup_steps": round(ratio * BENCHMARK_STEPS)}, why)
    _decay(found, steps)
    if (seed := found.whole("seed", least=0)) is not None:
        found.translated("seed", {"training.seed": seed})


def _decay(found: Findings, steps: int | None) -> None:
    """The falling part of a schedule, where the training run is known to be long enough for it."""
    key = "lr_scheduler_kwargs.num_decay_steps"
    decay = found.whole(key, least=0)
    if decay is None:
        return
    overrides = found.overrides | found.train
    warmup = overrides.get("training.warmup_steps", 0)
    if steps is None:
        found.lost(key, f"max_steps is not given: with training.steps=N add training.decay_steps={decay}")
    elif decay + warmup > steps:
        found.lost(key, f"{decay} steps do not fit into {steps} after a warm-up of {warmup}")
    else:
        found.translated(key, {"training.decay_steps": decay}, train=True)


def translate_train(found: Findings) -> None:
    """Checkpoints and evaluation: no part of a benchmark."""
    folder = found.text("output_dir")
    if folder is not None:
        found.translated("output_dir", {"checkpoint.dir": folder}, train=True)
    if (keep := found.whole("save_total_limit")) is not None:
        found.translated("save_total_limit", {"checkpoint.keep": keep}, train=True)
    share = found.number("val_set_size")
    held_out = bool(found.value("test_datasets")) if share is None else share != 0
    for key, name in (("save_steps", "checkpoint.every"), ("eval_steps", "evaluation.every")):
        every = found.number(key)
        if key == "eval_steps" and every is not None and not held_out:
            found.understood(key, "val_set_size holds nothing out to evaluate on")
            if share is None:
                found.assumed(
                    "val_set_size", {"evaluation.fraction": 0}, "Axolotl's default (ndbench train)", train=True
                )
        elif every is not None and every.is_integer() and every >= 1:
            found.translated(key, {name: int(every)}, train=True)
        elif every is not None:
            found.lost(key, "a part of all steps, whose number is not known here: give it in steps")
    if folder is None and {"checkpoint.every", "checkpoint.keep"} & set(found.train):
        found.assumed("output_dir", {"checkpoint.dir": "./model-out"}, "Axolotl's default (ndbench train)", train=True)
    for name, own, others in (
        ("checkpoint.every", "save_steps", ("saves_per_epoch", "save_strategy")),
        ("evaluation.every", "eval_steps", ("evals_per_epoch", "eval_strategy", "evaluation_strategy")),
    ):
        for key in others if name in found.train else ():
            found.understood(key, f"{own} is given, and says it (ndbench train)")
    if share is not None and 0 <= share <= 0.5:
        found.translated("val_set_size", {"evaluation.fraction": share}, train=True)
    elif share is not None:
        found.lost("val_set_size", "a number of samples; ndbench train takes a part of the data (evaluation.fraction)")
