"""What each module of a model becomes under tensor parallelism: the model's own plan, our rules, and the refusals.

The plan is transformers' (``base_model_tp_plan`` and the class's ``_tp_plan``) or the user's. Our rules add what plans
omit: embedding and ``lm_head`` over the vocabulary, norms, sequence parallelism. Nothing is changed here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from ndbench.parallel.styles import STYLES


@dataclass
class TensorPlan:
    """``styles``: module name -> style. ``entries``: modules whose hidden states enter work that is split over tp."""

    styles: dict[str, str] = field(default_factory=dict)
    entries: list[str] = field(default_factory=list)
    sequence_parallel: bool = False
    head: str | None = None
    """The output head whose logits stay sharded over the vocabulary, if any."""
    refusals: list[str] = field(default_factory=list)

    def refuse(self, name: str, why: str) -> None:
        """Add a refusal of module ``name``, once for all layers."""
        line = f"{_pattern(name)} {why}"
        if line not in self.refusals:
            self.refusals.append(line)


def tensor_plan(
    model: nn.Module,
    blocks: list[str],
    *,
    tp_size: int,
    sequence_parallel: bool,
    loss_parallel: bool,
    user_plan: Mapping[str, str] | None = None,
) -> TensorPlan:
    """The plan of ``model``, whose transformer blocks have the names ``blocks``; ``refusals`` names what does not work.

    A model that is not transformers' has no known residual stream, so its sequence is never sharded over tp.
    """
    ours = hasattr(model, "get_output_embeddings") and hasattr(model, "get_input_embeddings")
    plan = TensorPlan(sequence_parallel=sequence_parallel and ours)
    modules = dict(model.named_modules())
    source = user_plan if user_plan is not None else getattr(model, "_tp_plan", None)
    if not source:
        plan.refusals.append(f"{type(model).__name__} has no tensor-parallel plan")
        return plan
    _match(plan, model, modules, source, strict=user_plan is not None)
    if ours:
        _vocabulary(plan, model, modules, loss_parallel)
    if plan.refusals:
        return plan
    _regions(plan, modules, blocks, ours)
    if ours:
        _residual_stream(plan, modules)
    _shapes(plan, modules, tp_size)
    return plan


def _match(
    plan: TensorPlan, model: nn.Module, modules: dict[str, nn.Module], source: Mapping[str, str], strict: bool
) -> None:
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for pattern, style in source.items():
        regex = re.compile(re.escape(pattern).replace(r"\*", r"[^.]+") + r"\Z")
        found = [name for name in modules if regex.match(name)]
        on_parameters = [name for name in parameters if regex.match(name)]
        if not found and not on_parameters:
            if strict:
                plan.refusals.append(f"tp_plan pattern '{pattern}' matches no module of {type(model).__name__}")
            continue
        if style not in STYLES or on_parameters:
            plan.refusals.append(f"plan style '{style}' of '{pattern}' is not supported under tensor parallelism")
            continue
        plan.styles.update(dict.fromkeys(found, STYLES[style]))


def _vocabulary(plan: TensorPlan, model: nn.Module, modules: dict[str, nn.Module], loss_parallel: bool) -> None:
    names = {id(module): name for name, module in modules.items()}
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()  # type: ignore[operator]
    for what, module, kind in (("embedding", embedding, nn.Embedding), ("output head", head, nn.Linear)):
        if not isinstance(module, kind):
            plan.refusals.append(f"the {what} of {type(model).__name__} is not an {kind.__name__}")
            return
    plan.styles[names[id(embedding)]] = "embedding_rowwise"
    plan.styles[names[id(head)]] = "colwise" if loss_parallel else "colwise_gather_output"
    plan.head = names[id(head)] if loss_parallel else None


def _regions(plan: TensorPlan, modules: dict[str, nn.Module], blocks: list[str], ours: bool) -> None:
    """Where activations enter split work: transformers' attention and MLP modules, else each column-wise linear."""
    whole = {"", *blocks}
    for name, style in list(plan.styles.items()):
        if not style.startswith("colwise"):
            continue
        parent = name.rpartition(".")[0]
        entry = name if parent in whole or not ours else parent
        if entry not in plan.entries:
            plan.entries.append(entry)
        if parent in whole or style != "colwise":
            continue
        for inner, module in modules.items():
            within = inner == parent or inner.startswith(f"{parent}.")
            if within and inner not in plan.styles and any(True for _ in module.named_parameters(recurse=False)):
                kind = type(module).__name__
                plan.refuse(
                    inner, f"({kind}) has parameters but no plan, beside column-wise ones of {_pattern(parent)}"
                )


def _residual_stream(plan: TensorPlan, modules: dict[str, nn.Module]) -> None:
    """Under sequence parallelism, norms see a shard of the sequence; anything else with parameters is not known."""
    inside = tuple(f"{entry}." for entry in plan.entries)
    for name, module in modules.items():
        own = list(module.named_parameters(recurse=False))
        if not own or name in plan.styles:
            continue
        if not plan.sequence_parallel or name.startswith(inside):
            plan.styles[name] = "replicated"
        elif "norm" in type(module).__name__.lower() and all(parameter.ndim == 1 for _, parameter in own):
            plan.styles[name] = "partial"
        else:
            kind = type(module).__name__
            plan.refuse(name, f"({kind}) is neither in the plan nor a norm: sequence_parallel=false leaves it whole")


def _shapes(plan: TensorPlan, modules: dict[str, nn.Module], tp_size: int) -> None:
    for name, style in plan.styles.items():
        if not style.startswith(("colwise", "rowwise")):
            continue
        module = modules[name]
        if not isinstance(module, nn.Linear):
            plan.refuse(name, f"is a {type(module).__name__}: style '{style}' needs a Linear")
        elif style.startswith("rowwise") and module.in_features % tp_size:
            plan.refuse(name, f"has {module.in_features} input features, not a multiple of tp {tp_size}")
        elif style == "colwise" and name != plan.head and module.out_features % tp_size:
            # The vocabulary may be odd: only the loss looks at its shards.
            plan.refuse(name, f"has {module.out_features} output features, not a multiple of tp {tp_size}")


def _pattern(name: str) -> str:
    """A module's name with its layer number as a wildcard."""
    return re.sub(r"\.\d+(?=\.|\Z)", ".*", name)
