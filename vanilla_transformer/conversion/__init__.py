"""Other projects' checkpoints -> ours, and back: only tensors and names.

    convert       BERT, RoBERTa, DistilBERT, ELECTRA -> encoder; GPT-2, OPT -> decoder; BART, mBART, Marian -> seq2seq;
                  with `to`, ours -> BERT, GPT-2, OPT, BART, mBART, Marian
    plan          the same, decided and checked, nothing written; printed, it is the mapping
    from_torch    state dicts of torch.nn.TransformerEncoder, TransformerDecoder and Transformer -> ours
    convert_torch the same from file to checkpoint

Differences of layout are removed by permuting, slicing or joining weights. What a config cannot represent is refused before
anything is written.
"""

import os

from ..checkpoint import limit_generation
from ..errors import UsageError
from ..files import new_directory
from .plan import Plan, plan_to_ours, plan_to_theirs
from .tensors import TensorFiles
from .torch_nn import check_fields, from_torch

__all__ = ["Plan", "check_fields", "convert", "convert_torch", "from_torch", "plan"]


def plan(source: str | os.PathLike, to: str | None = None) -> Plan:
    """What `convert` would do. Raises: as `convert`, but for `out`."""
    return plan_to_ours(source) if to is None else plan_to_theirs(source, to)


def convert(source: str | os.PathLike, out: str | os.PathLike, to: str | None = None, force: bool = False) -> dict:
    """Converts the checkpoint `source`, a directory or Hub id, into the directory `out`: config, weights (one tensor at a
    time, in the dtypes they have), generation config and tokenizer. Returns what was written.

    Args:
        to: by default another project's checkpoint becomes ours; `"bert"`, `"gpt2"`, `"opt"`, `"bart"`, `"mbart"` or
            `"marian"` makes one of ours a checkpoint of that family.
        force: replace `out` if we wrote it.

    Raises:
        FileExistsError: if `out` cannot be written, see `files.new_directory`.
        FileNotFoundError: if there is no config.json or no weights.
        ValueError: for a family or architecture that is not known, a field that cannot be represented, unknown, missing or
            misshapen tensors, tied tensors that differ, and pickles that hold more than tensors.
    """
    with new_directory(out, force, [source]) as directory:
        found = plan(source, to)
        found.save(directory)
    return found.facts(out)


def convert_torch(
    source: str | os.PathLike, out: str | os.PathLike, embeddings: str | os.PathLike | None, force: bool = False, **fields
) -> dict:
    """`from_torch` on the files `source` and `embeddings` (safetensors, or pickles of tensors), saved as the checkpoint
    `out`. `fields` are those of `from_torch`, `num_attention_heads` among them. Returns what was written.

    Raises:
        UsageError: without `num_attention_heads` or `embeddings`, and for a field that no config has.
        FileExistsError, FileNotFoundError, ValueError: as `convert`; ValueError as `from_torch`.
    """
    if "num_attention_heads" not in fields:
        raise UsageError(f"num_attention_heads must be given, a state dict does not hold it; got {sorted(fields)}")
    if embeddings is None:
        raise UsageError("embeddings must be given, a file with embed_tokens: a state dict does not hold them")
    with new_directory(out, force, [source, embeddings]) as directory:
        read = ({name: files.read(name) for name in files.shapes} for files in map(TensorFiles, (source, embeddings)))
        state_dict, tables = read
        model = from_torch(state_dict, embeddings=tables, **fields)
        if model.can_generate():
            limit_generation(model.generation_config, model.config)
        model.save_pretrained(directory)
    return {"out": str(out), "architecture": type(model).__name__, "parameters": model.num_parameters()}
