"""The `vanilla-transformer` command. Its verbs have no logic of their own; each imports what it needs when it runs."""

import argparse
import contextlib
import json
import os
import signal
import sys
from pathlib import Path

from .errors import UsageError


def train(args):
    from accelerate import PartialState

    from vanilla_transformer.training.recipe import read_recipe

    changes = dict(args.set) if args.data is None else {"data.directory": str(args.data), **dict(args.set)}
    recipe = read_recipe(args.recipe, changes)
    if args.dry_run:
        from vanilla_transformer.training.dry_run import dry_run

        result = dry_run(recipe)
    else:
        from vanilla_transformer.files import output_path
        from vanilla_transformer.training.run import train

        output_path(args.output, [args.recipe])
        result = json.dumps(train(recipe, args.output, args.force, args.restart))
    if PartialState().is_main_process:
        say(result)


def average(args):
    from vanilla_transformer.training.averaging import average

    average(args.checkpoints, args.out, args.force)


def convert(args):
    from vanilla_transformer import conversion

    is_file = Path(args.source).is_file()
    others = {"--to": args.to, "--dry-run": args.dry_run} if is_file else {"--embeddings": args.embeddings, "--set": args.set}
    for name, value in others.items():
        if value:
            kinds = "checkpoints" if is_file else "a file with a state dict"
            raise UsageError(f"{name} is for {kinds}, and {args.source} is none")
    if is_file:
        fields = dict(args.set)
        conversion.check_fields(fields)
        say(json.dumps(conversion.convert_torch(args.source, args.out, args.embeddings, args.force, **fields)))
    elif args.dry_run:
        say(conversion.plan(args.source, args.to))
    else:
        say(json.dumps(conversion.convert(args.source, args.out, args.to, args.force)))


def info(args):
    from vanilla_transformer.info import info, report

    facts = info(args.directory)
    say(json.dumps(facts) if args.json else report(facts))


def attention(args):
    from vanilla_transformer.attention_maps import save_attention_maps

    texts = [args.source] if args.target is None else [args.source, args.target]
    shown = {"layer": args.layer, "head": args.head, "kind": args.kind}
    save_attention_maps(args.checkpoint, args.out, *texts, **shown, force=args.force)


def export(args):
    from vanilla_transformer.files import output_path

    from .exporting import export
    from .shortlist import shortlist_from_text

    output_path(args.out, [] if args.shortlist is None else [args.shortlist])
    tokens = None if args.shortlist is None else shortlist_from_text(args.shortlist, args.checkpoint)
    settings = {"target": args.target, "dtype": args.dtype, "shortlist": tokens, "opset": args.opset}
    manifest = export(args.checkpoint, args.out, args.force, **settings)
    files = {name: facts["bytes"] for name, facts in manifest["files"].items() if name.endswith(".onnx")}
    others = {f"parity of {dtype}": facts["parity"] for dtype, facts in manifest.get("other_dtypes", {}).items()}
    say(json.dumps({"out": str(args.out), "files": files, "parity": manifest["parity"], **others}))


def verify(args):
    from .exporting import load_checkpoint
    from .parity import verify
    from .runtime.artifact import read_artifact

    model, dtypes = load_checkpoint(args.checkpoint), read_artifact(args.out).dtypes
    reports = {dtype: verify(args.out, model, args.cases, args.seed, dtype=dtype) for dtype in dtypes}
    for dtype, report in reports.items():
        say(f"{dtype}: {report}" if len(dtypes) > 1 else report)
        if settings := metric_settings(args):
            from .evaluation import compare

            say(json.dumps(compare(args.out, args.checkpoint, dtype, batch_size=args.batch_size, **settings)))
    if failures := [failure for report in reports.values() for failure in report.failures]:
        sys.exit("\n".join(failures))


def generate(args):
    from .runtime.lines import Batches, generate_file, read_lines
    from .runtime.text import TextRuntime

    check_sources(args)
    runtime = TextRuntime(args.out, args.threads, device=args.device, engine_cache=args.engine_cache, dtype=args.dtype)
    options = generation_options(args) | dict(args.set)
    if args.stream:
        for text in args.text or lines_of_standard_input():
            for piece in runtime.stream(text, **options) if text.strip() or args.text else ():
                print(piece, end="", flush=True)
            print()
    elif args.text:
        say("\n".join(runtime.generate(args.text, **options)))
    else:
        batches = Batches(runtime, options, args.batch_size, args.n_best, args.scores)
        if args.output is not None:
            generate_file(batches, args.input, args.output, args.target_prefix, args.force)
            return
        lines = lines_of_standard_input() if args.input is None else read_lines(args.input)
        for window in batches.windows(lines):
            say("\n".join(window))


def check_sources(args):
    """What is generated from: texts, the lines of standard input, or those of a file."""
    if args.input is not None and args.text:
        raise UsageError("--input goes without texts, expected one of them")
    if args.output is not None and (args.input is None or args.stream):
        raise UsageError("--output needs --input, and goes without --stream")
    for name in ("target_prefix", "force"):
        if getattr(args, name) and args.output is None:
            raise UsageError(f"--{name.replace('_', '-')} needs --input and --output")
    for name in ("n_best", "scores"):
        if getattr(args, name) and (args.text or args.stream):
            raise UsageError(f"--{name.replace('_', '-')} is for lines, expected no texts and no --stream")


def lines_of_standard_input():
    from .runtime.lines import lines_of

    if sys.stdin is None or sys.stdin.closed:
        raise ValueError("standard input is closed, expected a text on each line, or texts as arguments")
    return lines_of(sys.stdin.buffer, "standard input")


def evaluate(args):
    from .evaluation import evaluate

    options = {"batch_size": args.batch_size, "dtype": args.dtype, **metric_settings(args), **generation_options(args)}
    say(json.dumps(evaluate(args.directory, **options)))


def metric_settings(args):
    names = ("source", "target", "text", "labels", "bleu_tokenize")
    return {name: getattr(args, name) for name in names if getattr(args, name) is not None}


def doctor(args):
    from .runtime.devices import facts
    from .runtime.doctor import report

    found = facts()
    say(json.dumps(found) if args.json else report(found))


def add_metric_settings(verb):
    verb.add_argument("--source", type=path, help="for BLEU: one sentence a line, .gz or plain")
    verb.add_argument("--target", type=path, help="its translations, line by line")
    verb.add_argument("--bleu-tokenize", help="of sacreBLEU: 13a (if not given), or none for text that is in tokens already")
    verb.add_argument("--text", type=path, help="for (pseudo-)perplexity: any text; for accuracy: one text a line")
    verb.add_argument("--labels", type=path, help="for accuracy: the name or id of each text's label, line by line")
    verb.add_argument("--batch-size", type=positive, default=32, help="sentences run together")


def generation_options(args):
    names = ("max_new_tokens", "num_beams", "length_penalty")
    return {name: getattr(args, name) for name in names if getattr(args, name) is not None}


def add_generation_options(verb):
    verb.add_argument("--num-beams", type=positive, help="1 is greedy; the checkpoint's own setting if not given")
    verb.add_argument("--max-new-tokens", type=positive, help="the checkpoint's own setting if not given")
    verb.add_argument("--length-penalty", type=float, help="the checkpoint's own setting if not given")


def key_value(text):
    """`name=value`, the value as JSON where it is that, else as a string."""
    name, separator, value = unicode(text).partition("=")
    if not separator:
        raise argparse.ArgumentTypeError(f"expected key=value, got {text!r}")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value
    except (ValueError, RecursionError) as error:  # thousands of digits, or of brackets
        raise argparse.ArgumentTypeError(f"expected a value in JSON or text, got {text[:40]!r}...: {error}") from None


def unicode(text):
    """An argument that is a text. Bytes that are no UTF-8 may be a path's."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError(f"expected UTF-8 text, got {os.fsencode(text)!r}") from None
    return text


def source(text):
    """A directory or Hub id; an empty one, as of a variable that is not set, would be the working directory."""
    if not text:
        raise argparse.ArgumentTypeError("expected a path, got ''")
    return text


def path(text):
    return Path(source(text))


def names(text):
    """One name, or several with commas between."""
    return text.split(",") if "," in text else text


def positive(text):
    return whole(text, 1)


def natural(text):
    return whole(text, 0)


def whole(text, least):
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least {least}, got {text[:40]!r}") from None
    if not least <= value < 2**63:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least {least} and below 2**63, got {text[:40]}")
    return value


def build_parser():
    formatter = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(prog="vanilla-transformer", description=__doc__.splitlines()[0])
    verbs = parser.add_subparsers(required=True, metavar="VERB")

    verb = verbs.add_parser("train", help="train a model as a recipe says", formatter_class=formatter)
    verb.set_defaults(run=train, extras="train,cpu")
    verb.add_argument("recipe", help="a recipe's name (a wrong one lists them) or its .toml file")
    verb.add_argument("--data", type=path, help="directory of the recipe's text files")
    verb.add_argument("--output", type=path, required=True, help="checkpoint directory to write; OUTPUT-run holds the state")
    help_of_set = "change the recipe: training.learning_rate=1e-3, model.dropout=0.2 ..."
    verb.add_argument("--set", type=key_value, action="append", default=[], metavar="KEY=VALUE", help=help_of_set)
    verb.add_argument("--dry-run", action="store_true", help="print sizes, and time and memory of a few updates; write nothing")
    verb.add_argument("--force", action="store_true", help="replace OUTPUT if it is a checkpoint of ours")
    verb.add_argument("--restart", action="store_true", help="begin anew: move OUTPUT-run, if it is there, to a free name")

    verb = verbs.add_parser("average", help="the mean of the weights of several checkpoints", formatter_class=formatter)
    verb.set_defaults(run=average, extras="torch")
    verb.add_argument("checkpoints", nargs="+", type=source, help="checkpoint directories of one model")
    verb.add_argument("--out", type=path, required=True, help="checkpoint directory to write")
    verb.add_argument("--force", action="store_true", help="replace OUT if it is ours")

    families = "BERT, RoBERTa, DistilBERT, ELECTRA, GPT-2, OPT, BART, mBART or Marian"
    verb = verbs.add_parser("convert", help="another project's checkpoint -> ours, and back", formatter_class=formatter)
    verb.set_defaults(run=convert, extras="torch")
    verb.add_argument(
        "source", type=source, help=f"checkpoint directory or Hub id ({families}), or a torch.nn.Transformer's state dict file"
    )
    verb.add_argument("out", type=path, help="checkpoint directory to write")
    families = ("bert", "gpt2", "opt", "bart", "mbart", "marian")
    verb.add_argument("--to", choices=families, help="convert one of our checkpoints to this family")
    verb.add_argument("--dry-run", action="store_true", help="print which tensor becomes which, and write nothing")
    verb.add_argument("--embeddings", type=path, help="a file with embed_tokens; a state dict of torch needs it")
    help_of_set = "a config field; a state dict of torch needs num_attention_heads"
    verb.add_argument("--set", type=key_value, action="append", default=[], metavar="KEY=VALUE", help=help_of_set)
    verb.add_argument("--force", action="store_true", help="replace OUT if it is ours")

    verb = verbs.add_parser("info", help="shape, parameters, memory and FLOPs of a checkpoint", formatter_class=formatter)
    verb.set_defaults(run=info, extras="torch")
    verb.add_argument("directory", type=source, help="checkpoint directory or Hub id")
    verb.add_argument("--json", action="store_true", help="print JSON")

    verb = verbs.add_parser("attention", help="draw where each head looks, as PNG", formatter_class=formatter)
    verb.set_defaults(run=attention, extras="train")
    verb.add_argument("checkpoint", type=source, help="checkpoint directory or Hub id")
    verb.add_argument("source", type=unicode, help="a text")
    verb.add_argument("target", type=unicode, nargs="?", help="its translation; that of the model if not given")
    verb.add_argument("--kind", help="encoder, decoder or cross (if not given), for models that have all three")
    verb.add_argument("--layer", type=natural, help="from 0 on; all if not given")
    verb.add_argument("--head", type=natural, help="from 0 on; all if not given; with a layer, one map with its tokens")
    verb.add_argument("--out", type=path, required=True, help="file to write")
    verb.add_argument("--force", action="store_true", help="replace OUT if it is ours")

    verb = verbs.add_parser("export", help="write a checkpoint as ONNX graphs", formatter_class=formatter)
    verb.set_defaults(run=export, extras="torch,cpu")
    verb.add_argument("checkpoint", type=source, help="checkpoint directory or Hub id")
    verb.add_argument("out", type=path, help="export directory to write")
    verb.add_argument("--target", default="portable", help="portable (standard operators), cpu or cuda (onnxruntime's own)")
    help_of_dtype = "of the weights: fp32 (if not given) or int8; cpu: int4 too; cuda: fp32, fp16, bf16 (fp16 if it holds), "
    verb.add_argument("--dtype", type=names, help=f"{help_of_dtype}int8 or int4; portable: several too, as fp32,int8")
    verb.add_argument("--opset", type=positive, help="of portable graphs, 18 (if not given) to 23")
    verb.add_argument("--shortlist", type=path, help="text: only its tokens, and the special ones, can be generated")
    verb.add_argument("--force", action="store_true", help="replace OUT if it is ours")

    verb = verbs.add_parser(
        "verify", help="compare an export with its checkpoint, and their metrics on text", formatter_class=formatter
    )
    verb.set_defaults(run=verify, extras="torch,cpu")
    verb.add_argument("out", type=path, help="export directory")
    verb.add_argument("checkpoint", type=source, help="checkpoint directory or Hub id")
    verb.add_argument("--cases", type=positive, default=60, help="random batches to compare")
    verb.add_argument("--seed", type=natural, default=0, help="of the batches")
    add_metric_settings(verb)

    verb = verbs.add_parser("generate", help="translate or continue text with an export", formatter_class=formatter)
    verb.set_defaults(run=generate, extras="cpu")
    verb.add_argument("out", type=path, help="export directory")
    verb.add_argument("text", type=unicode, nargs="*", help="texts; without any, the lines of standard input")
    verb.add_argument("--threads", type=positive, help="processor threads; all this process may use if not given")
    verb.add_argument("--device", help="cpu, cuda or tensorrt; that of the target if not given")
    verb.add_argument("--dtype", help="which of the export's, if it has several; the first if not given")
    verb.add_argument("--engine-cache", type=path, help="where tensorrt keeps what it compiled; nowhere if not given")
    verb.add_argument("--stream", action="store_true", help="one text after the other, each as it is generated; without beams")
    verb.add_argument("--input", type=path, help="file, .gz or plain: a text a line; a line without words gives an empty one")
    help_of_output = "file for the results, line by line; the same call goes on where one that was stopped was"
    verb.add_argument("--output", type=path, help=help_of_output)
    verb.add_argument("--target-prefix", type=path, help="file: what the translation of each line begins with; for seq2seq")
    shape = verb.add_mutually_exclusive_group()
    shape.add_argument("--n-best", type=positive, help="so many results of each line: `line ||| text ||| score`")
    shape.add_argument("--scores", action="store_true", help="behind each result a tab and its score, of log probabilities")
    verb.add_argument("--batch-size", type=positive, default=32, help="lines run together, those of similar length")
    verb.add_argument("--force", action="store_true", help="replace OUTPUT")
    add_generation_options(verb)
    help_of_set = "another generation setting: do_sample=true, top_p=0.9, seed=1, no_repeat_ngram_size=3 ..."
    verb.add_argument("--set", type=key_value, action="append", default=[], metavar="KEY=VALUE", help=help_of_set)

    verb = verbs.add_parser("evaluate", help="BLEU, perplexity or accuracy on text", formatter_class=formatter)
    verb.set_defaults(run=evaluate, extras="train,cpu")
    verb.add_argument("directory", type=source, help="checkpoint directory (torch) or export directory (onnxruntime)")
    verb.add_argument("--dtype", help="which of an export's, if it has several; the first if not given")
    add_metric_settings(verb)
    add_generation_options(verb)

    verb = verbs.add_parser("doctor", help="what is installed here, and what will run where", formatter_class=formatter)
    verb.set_defaults(run=doctor, extras="cpu")
    verb.add_argument("--json", action="store_true", help="print JSON")
    return parser


def main(argv=None):
    open_standard_streams()
    try:
        with terminated_as_interrupted():
            args = build_parser().parse_args(argv)
            args.run(args)
    except KeyboardInterrupt as interrupt:
        fail("interrupted", 143 if isinstance(interrupt, Terminated) else 130)
    except ImportError as error:
        remedy = f": pip install 'vanilla-transformer[{args.extras}]'" if error.name else ""
        fail(f"{error}{remedy}")
    except Exception as error:
        # What the library raises for wrong input; a config's type checks have classes of their own. Where no room is left,
        # safetensors and torch have errors of their own too.
        is_full = type(error).__name__ == "SafetensorError" or "inline_container.cc" in str(error)
        is_known = isinstance(error, OSError | ValueError | FloatingPointError)
        if is_full or is_known or type(error).__module__ == "huggingface_hub.errors":
            fail(error, getattr(error, "exit_code", 1))
        raise


def open_standard_streams():
    """Where one is closed, the next file that is opened gets its number, and whatever a library prints."""
    while (number := os.open(os.devnull, os.O_RDWR)) < 3:
        os.set_inheritable(number, True)
    os.close(number)


class Terminated(KeyboardInterrupt):
    """SIGTERM, which is to leave as little behind as Ctrl-C."""


@contextlib.contextmanager
def terminated_as_interrupted():
    def terminate(*_):
        raise Terminated

    try:
        before = signal.signal(signal.SIGTERM, terminate)
    except ValueError:  # not the main thread: the program that called decides what signals do
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def say(result: object) -> None:
    """Prints `result` at once: that it cannot be written is found here, and not where the interpreter ends.

    Raises:
        OSError: if standard output is closed, or nobody reads it.
    """
    if sys.stdout is None:
        raise OSError("standard output is closed, expected a place for the result")
    try:
        print(result, flush=True)
    except OSError as error:
        with contextlib.suppress(OSError, ValueError):  # what is left in the buffer is not tried again
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise OSError(f"standard output cannot be written: {error.strerror or error}") from None


def fail(error: object, code: int = 1):
    """Ends the process with one line."""
    line = f"vanilla-transformer: {' '.join(str(error).split())}"
    if code == 1:
        sys.exit(line)
    print(line, file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
