"""The plan of a checkpoint of another family, whose class is settled, as one of ours."""

import re

from transformers import PreTrainedConfig, PreTrainedModel

import vanilla_transformer

from ..checkpoint import CONFIG
from ..checkpoint_config import check_depth
from ..checkpoint_files import readers_errors
from .conversion_plan import ConversionPlan, TensorStep
from .converter import Converter, ForeignCheckpoint, as_class
from .fields import require
from .plan_parts import check_missing, empty_model, read_generation_config, vanilla_config
from .unknown_tensors import check_foreign_prefix, further_heads


def plan_as(source: ForeignCheckpoint, architecture: str) -> ConversionPlan:
    """Return the plan for `source` as the class `architecture`.

    If tensors that the config ties have different values, the plan is made without tying. Raises
    ValueError if tensors still differ that must be equal, if some are missing, and for fields that
    our config cannot represent.
    """
    theirs = as_class(source.theirs, architecture)
    source, files = source._replace(theirs=theirs), source.files
    plan = plan_by_config(source)
    unequal = plan.unequal()
    # transformers does not tie unequal tensors, whatever the config says
    if unequal and getattr(theirs, "tie_word_embeddings", False):
        theirs.tie_word_embeddings = False
        plan = plan_by_config(source)
        unequal = plan.unequal()
    if unequal:
        raise ValueError(
            f"{files.path}: {' and '.join(unequal[0])} differ, expected one tensor under both names"
        )
    return plan


def plan_by_config(source: ForeignCheckpoint) -> ConversionPlan:
    theirs, converter, files = source
    model_class = our_class(theirs, converter)
    if theirs.is_encoder_decoder and getattr(theirs, "decoder_start_token_id", None) is None:
        theirs.decoder_start_token_id = read_generation_config(files.path).decoder_start_token_id
    with readers_errors(files.path / CONFIG):
        config = vanilla_config(theirs, converter, files.shapes, model_class.config_class)
    if not converter.SHARES_LAYERS:
        check_depth(config, files.shapes, files.path)
    converter.check_tensors(files, theirs)
    model = empty_model(model_class, config, files, theirs)
    steps, unused, foreign = steps_to_vanilla(model, source)
    plan = ConversionPlan(
        model,
        files,
        steps,
        unused,
        foreign=foreign,
        image_processor=converter.IMAGE_PROCESSOR,
        translates=converter.TRANSLATES and model.can_generate(),
    )
    if foreign:
        plan.remarks.append(
            f"left out tensors that no class of {theirs.model_type} has: {', '.join(foreign)}"
        )
    return plan


def our_class(theirs: PreTrainedConfig, converter: Converter) -> type[PreTrainedModel]:
    """Return our class for that of the source.

    A decoder with `is_causal=False` is an encoder, as in transformers. Raises ValueError if no
    encoder has its head.
    """
    architecture = theirs.architectures[0]
    name = converter.ARCHITECTURES[architecture]
    if "Decoder" in name and getattr(theirs, "is_causal", None) is False:
        require(theirs, sliding_window=None)
        if name.endswith(("ForCausalLM", "ForSequenceClassification")):
            raise ValueError(
                f"is_causal=False cannot be converted for {architecture}, expected True, or a "
                "class without this head: --set architectures=NAME"
            )
        name = name.replace("Decoder", "Encoder")
    return getattr(vanilla_transformer, name)


def steps_to_vanilla(
    model: PreTrainedModel, source: ForeignCheckpoint
) -> tuple[list[TensorStep], list[str], list[str]]:
    """Return (steps, unused, foreign) of a conversion of `source` into `model`.

    `steps` make all tensors of `model`. `unused` are the names of tensors that are left out, and
    `foreign` those of them that no class of the family has. Raises ValueError if tensors are
    missing, or unknown ones stand inside a module that is converted.
    """
    theirs, converter, files = source
    architecture = theirs.architectures[0]
    is_base = not hasattr(model, "model")
    parameters = model.state_dict().keys()
    steps = []
    missing = []
    for entry in converter.tensor_maps(model.config, theirs):
        ours = tuple(name.removeprefix("model.") if is_base else name for name in entry.ours)
        if not parameters >= set(ours) or not ours:
            continue
        lacking = [name for name in entry.extra_inputs if name not in files.shapes]
        stored = [name for name in entry.names if name in files.shapes]  # several are equal
        stored = stored or [name for name in entry.otherwise if name in files.shapes][:1]
        if not entry.theirs:
            steps.append(TensorStep((), ours, entry.op.to_ours, entry.op.name))
        elif stored and not lacking:
            steps.append(
                TensorStep(
                    (stored[0], *entry.extra_inputs),
                    ours,
                    entry.op.to_ours,
                    entry.op.name,
                    tuple(stored[1:]),
                )
            )
        else:
            missing += [(ours, name) for name in (lacking if stored else [entry.theirs, *lacking])]
    known = {
        name
        for other in converter.ARCHITECTURES
        for entry in converter.tensor_maps(model.config, as_class(theirs, other))
        for name in entry.all_theirs
    }
    check_foreign_prefix(files, known)
    # of a tensor that files have in one or several parts, one map is enough
    written = {name for step in steps for name in step.writes}
    check_missing([name for ours, name in missing if not written >= set(ours)], architecture, files)
    used = {name for step in steps for name in (*step.reads, *step.same)}
    no_weights = re.compile(converter.UNUSED)
    rest = {
        name
        for name in files.shapes
        if not no_weights.fullmatch(name) and "position_ids" not in name
    } - used
    foreign = further_heads(
        rest, known, files, f"{files.path} has tensors that {architecture} does not know"
    )
    return steps, sorted([*rest, *files.removed]), foreign
