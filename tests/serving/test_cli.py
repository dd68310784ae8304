"""Tests of the command `serve`: settings, output, signals, and rejected exports."""

import dataclasses
import json
import re
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
import yaml
from checkpoints import copy_folder, with_tokenizer
from command_line import COMMAND, read_error
from messages import check_message, raises

from vanilla_transformer_export.arguments import flag
from vanilla_transformer_export.cli import main as cli
from vanilla_transformer_export.engine.limits import Arrangement
from vanilla_transformer_export.errors import UsageError
from vanilla_transformer_export.serving import server
from vanilla_transformer_export.serving.service import limit_workers, make_plan
from vanilla_transformer_export.serving.settings import (
    FIELDS,
    PREFIX,
    TOKEN,
    Settings,
    parse_settings,
    read_token,
    sources,
)

# For each setting: its text and its parsed value.
VALUES = {
    "host": ("0.0.0.0", "0.0.0.0"),
    "port": ("0", 0),
    "languages": ("m:en-de", (("m", "en", "de"),)),
    "dtype": ("int8", "int8"),
    **{
        name: ("7", 7)
        for name in (
            "workers",
            "threads",
            "slots",
            "max_source",
            "max_length",
            "queue",
            "max_batch",
            "max_body",
        )
    },
    **{name: ("9", 9) for name in ("requests", "connections")},
    **{
        name: ("0.5", 0.5)
        for name in (
            *("timeout", "header_timeout", "body_timeout", "grace", "drain", "idle_unload"),
        )
    },
    "lazy": ("true", True),
    "max_memory": ("2GB", 2 * 10**9),
    "auto_truncate": ("false", False),
    "token_file": ("a/file", Path("a/file")),
    "cors_origin": ("https://example.org:8443", ("https://example.org:8443",)),
    "log_level": ("debug", "debug"),
}


ROOT = Path(__file__).parents[2]


def parse(*words, **environment):
    return parse_settings(
        cli.parse(["serve", "an-export", *words]),
        {PREFIX + name: text for name, text in environment.items()},
    )


def test_every_setting_has_flag_and_variable_and_flag_takes_precedence():
    assert VALUES.keys() == FIELDS.keys()
    for name, (text, value) in VALUES.items():
        field, other = (
            FIELDS[name],
            {
                "log_level": "error",
                "languages": "a-b",
                "cors_origin": "*",
                "auto_truncate": "true",
                "lazy": "false",
            }.get(name, "3"),
        )
        assert value != field.default
        words = [flag(field)] if name == "lazy" else [flag(field), text]
        assert parse(*words) == dataclasses.replace(Settings(), **{name: value})
        assert parse(**{name.upper(): text}) == dataclasses.replace(Settings(), **{name: value})
        assert parse(*words, **{name.upper(): other}) == dataclasses.replace(
            Settings(), **{name: value}
        )
        assert parse(**{name.upper(): " "}) == Settings()


def test_repeatable_settings_are_lists():
    pairs = ((None, "en", "de"), ("m", "zh-Hans", "en"))
    assert parse("--languages", "en-de", "--languages", "m:zh-Hans-en").languages == pairs
    assert parse(LANGUAGES="en-de  m:zh-Hans-en").languages == pairs
    assert parse(CORS_ORIGIN="http://a http://b").cors_origin == ("http://a", "http://b")


@pytest.mark.parametrize(
    "name, text, expected",
    [
        ("port", "65536", (0, 65535)),
        ("port", "http", 0),
        ("queue", "0", (1, "2**63")),
        ("timeout", "0", (0, 1000000)),
        ("timeout", "nan", (0, 1000000)),
        ("idle_unload", "0", (0, 1000000)),
        ("max_memory", "0", "2GB"),
        ("max_memory", "2 GiB", "2GB"),
        ("drain", "soon", (0, 1000000)),
        ("languages", "english", ("en-de", "NAME:en-de")),
        ("cors_origin", "example.org", "https://example.org"),
        ("auto_truncate", "yes", ("true", "false")),
        ("log_level", "loud", ("debug", "info", "warning", "error")),
    ],
)
def test_invalid_setting_raises_usage_error(name, text, expected):
    with raises(UsageError, seen=(flag(FIELDS[name]), text), expected=expected):
        parse(flag(FIELDS[name]), text)
    with raises(UsageError, seen=(PREFIX + name.upper(), text), expected=expected):
        parse(**{name.upper(): text})


def test_token_is_read_from_file_or_environment(tmp_path):
    file = tmp_path / "token"
    file.write_text("a-token\n")
    settings = Settings(token_file=file)
    assert (
        read_token(settings, {}),
        read_token(Settings(), {PREFIX + "TOKEN": "b"}),
        read_token(Settings(), {}),
    ) == (
        b"a-token",
        b"b",
        None,
    )
    with raises(UsageError, seen="token"):
        read_token(settings, {PREFIX + "TOKEN": "b"})
    for text in ("", "\n", "two words", "größe"):
        file.write_text(text)
        with raises(ValueError, expected="ASCII"):
            read_token(settings, {})
        with raises(ValueError, seen=PREFIX + "TOKEN"):
            read_token(Settings(), {PREFIX + "TOKEN": text})
    with pytest.raises(FileNotFoundError):
        read_token(Settings(token_file=tmp_path / "nowhere"), {})
    # arguments are visible to all users, so there is no such flag
    assert "token" not in {field.name for field in dataclasses.fields(Settings)}


# ------------------------------------------------------------------------------------------ exports


def write_manifest(folder, name, architecture):
    """Write an export with only a manifest, the one file read before the server listens."""
    (folder / name).mkdir()
    (folder / name / "manifest.json").write_text(json.dumps({"architecture": architecture}))
    return folder / name


def test_exports_are_named_by_directory_or_argument(tmp_path, monkeypatch):
    directory = write_manifest(tmp_path, "export", "VanillaSeq2SeqForConditionalGeneration")
    monkeypatch.chdir(directory)
    (tmp_path / "a=b").symlink_to(directory)
    result = sources(
        [".", f"other={directory}", "m.2-x=."], [("other", "en", "de"), ("other", "de", "en")]
    )
    assert [each.name for each in result] == ["export", "other", "m.2-x"]
    assert [each.languages for each in result] == [[], [("en", "de"), ("de", "en")], []]
    assert all(each.generates for each in result)
    with raises(UsageError, seen="a=b", expected=("NAME", "PATH")):
        sources([str(tmp_path / "a=b")], [])


@pytest.mark.parametrize(
    "words, seen, expected",
    [
        (["{0}", "{0}"], "seq2seq", ()),
        (["a={0}", "a={1}"], "a", ()),
        (["a/b={0}"], "a/b", ()),
        (["..={0}"], "..", ()),
        (["a="], "a=", ("NAME", "PATH")),
        (["={0}"], "''", ()),
        (["{0}", "--languages", "x:en-de"], ("--languages", "x"), "seq2seq"),
        (["a={0}", "b={0}", "--languages", "en-de"], (), ()),
        (["a={1}", "--languages", "en-de"], (), ()),
        (["{0}/nowhere"], "does not exist", "vanilla-transformer export"),
    ],
)
def test_invalid_exports_fail_before_server_listens(words, seen, expected, tmp_path, monkeypatch):
    monkeypatch.setattr(server, "listening", None)
    kinds = {
        "seq2seq": "VanillaSeq2SeqForConditionalGeneration",
        "causal": "VanillaDecoderForCausalLM",
    }
    directories = [write_manifest(tmp_path, *each) for each in kinds.items()]
    check_message(
        read_error("serve", *(word.format(*directories) for word in words)),
        seen=seen,
        expected=expected,
    )


def test_busy_port_and_unknown_host_raise_os_error():
    with server.listening("127.0.0.1", 0) as busy_socket:
        number = busy_socket.getsockname()[1]
        with raises(OSError, seen=("127.0.0.1", number)):
            server.listening("127.0.0.1", number)
    with raises(OSError, seen=("no.such.host", 0)):
        server.listening("no.such.host", 0)


def test_missing_serve_packages_error_names_pip_command(tmp_path, monkeypatch):
    for name in [
        name for name in sys.modules if name.startswith("vanilla_transformer_export.serving.server")
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    result = write_manifest(tmp_path, "export", "VanillaEncoderModel")
    assert read_error("serve", result).endswith(": pip install 'vanilla-transformer[cpu,serve]'")


# ------------------------------------------------------------------------------- the server process


class ServerProcess:
    """The command in a process of its own. `lines` are its output until it is ready."""

    def __init__(self, *words, stderr=subprocess.DEVNULL, until="ready"):
        arguments = [COMMAND, "serve", *map(str, words), "--port", "0", "--grace", "0.1"]
        self.process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=stderr, text=True)
        self.lines = []
        while not self.lines or (self.lines[-1] and self.lines[-1] != until):
            self.lines.append(self.process.stdout.readline().removesuffix("\n"))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.communicate()

    @property
    def url(self):
        return self.lines[0].removeprefix("listening on ")


@pytest.fixture(scope="module")
def decoder_export(exported, tmp_path_factory):
    """An export of a decoder, with a tokenizer."""
    directory = copy_folder(exported("causal").directory, tmp_path_factory.mktemp("text"))
    with_tokenizer(directory, 48)
    return directory


def test_serve_prints_address_and_models_and_exits_0_on_sigterm(
    decoder_export,
):
    with ServerProcess(f"a-model={decoder_export}", stderr=subprocess.PIPE) as started:
        listening, model, ready = started.lines
        assert re.fullmatch(r"listening on http://127\.0\.0\.1:\d+", listening)
        assert (
            model.startswith("a-model: VanillaDecoderForCausalLM, portable, fp32")
            and ready == "ready"
        )
        assert httpx.get(f"{started.url}/health/ready").json() == {
            "status": "ok",
            "models": {"a-model": "ready"},
        }
        assert httpx.get(f"{started.url}/nowhere").status_code == 404
        started.process.send_signal(signal.SIGTERM)
        rest, log = started.process.communicate(timeout=20)
        assert (started.process.returncode, rest) == (0, "")
        assert [json.loads(line)["message"] for line in log.splitlines()] == ["request", "stopping"]


def test_second_signal_ends_server_at_once(decoder_export):
    with (
        ServerProcess(decoder_export, "--drain", "60") as started,
        httpx.Client(base_url=started.url) as client,
    ):
        assert client.get("/health/live").status_code == 200
        started.process.send_signal(signal.SIGINT)
        time.sleep(0.03)
        started.process.send_signal(signal.SIGINT)
        assert started.process.wait(5) in (130, 0)  # 0 if both signals arrive together


@pytest.mark.parametrize(
    "name, content, seen, expected",
    [
        ("onnx/model.onnx", b"no graph", ("model.onnx", 8), ()),
        ("tokenizer.json", None, "tokenizer.json", ()),
        ("manifest.json", b"{", ("manifest.json", "JSON"), ()),
        ("manifest.json", b"{}", None, 2),
        ("config.json", b"{}", ("config.json", "num_hidden_layers"), ()),
        (
            "config.json",
            b'{"num_hidden_layers": 1, "hidden_size": {}}',
            ("config.json", "num_attention_heads"),
            (),
        ),
        (
            "config.json",
            b'{"num_hidden_layers": 1, "hidden_size": {}, "num_attention_heads": {}}',
            "config.json",
            (),
        ),
    ],
)
def test_damaged_export_exits_with_1_and_one_error_line_and_is_never_ready(
    decoder_export, tmp_path, name, content, seen, expected, capsys
):
    directory = copy_folder(decoder_export, tmp_path)
    (directory / name).unlink()
    if content is not None:
        (directory / name).write_bytes(content)
    with pytest.raises(SystemExit) as stopped:
        cli.main(["serve", str(directory), "--port", "0"])
    message = stopped.value.code  # for a text, Python prints it and exits with 1
    assert isinstance(message, str) and "\n" not in message
    check_message(message, seen=seen, expected=expected)
    assert "ready" not in capsys.readouterr().out


def test_missing_dtype_error_names_available_dtype(decoder_export):
    result = read_error("serve", decoder_export, "--port", "0", "--dtype", "int8")
    check_message(result, seen="int8", expected="fp32")


# ------------------------------------------------------------------------------------ the container


@pytest.mark.parametrize("name, extra", [("Dockerfile", "cpu"), ("Dockerfile.gpu", "gpu")])
def test_dockerfile_copies_existing_files_and_runs_as_unprivileged_user(name, extra):
    lines = (ROOT / "examples" / "serving" / name).read_text().splitlines()
    install = f'pip install --no-cache-dir -c constraints.txt ".[{extra},serve]"'
    assert any(line.endswith(install) for line in lines)
    steps = [line.split() for line in lines if line and not line.startswith((" ", "#"))]
    copied = [
        word
        for name, *words in steps
        if name == "COPY" and not words[0].startswith("--")
        for word in words[:-1]
    ]
    assert len(copied) == 6 and [name for name in copied if not (ROOT / name).exists()] == []
    sent = {f"!{name}" for name in copied}
    assert sent == {*(ROOT / ".dockerignore").read_text().splitlines()} & sent
    variables = [
        word.partition("=")[0].removeprefix(PREFIX).lower()
        for name, *words in steps
        if name == "ENV"
        for word in words
    ]
    toolkit_variables = {"nvidia_visible_devices", "nvidia_driver_capabilities"}
    assert {*variables} - {"path", *FIELDS} == (toolkit_variables if extra == "gpu" else set())
    assert "USER 10001" in lines and json.loads(lines[-1].removeprefix("ENTRYPOINT ")) == [
        "vanilla-transformer",
        "serve",
    ]
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]["serve"]
    assert not [
        name
        for name in needed
        if "torch" in name or "transformers" in name.replace("vanilla-transformer", "")
    ]


def read_yaml(name):
    return [*yaml.safe_load_all((ROOT / "examples" / "serving" / name).read_text())]


def test_compose_file_reserves_one_gpu():
    [compose] = read_yaml("compose-gpu.yaml")
    [service] = compose["services"].values()
    context = (ROOT / "examples" / "serving" / service["build"]["context"]).resolve()
    assert context == ROOT and (ROOT / service["build"]["dockerfile"]).is_file()
    [gpu] = service["deploy"]["resources"]["reservations"]["devices"]
    assert gpu == {"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}
    [volume] = service["volumes"]
    assert service["command"] == [f"translator={volume.split(':')[-2]}"]


@pytest.mark.parametrize("name", ["kubernetes.yaml", "kubernetes-gpu.yaml"])
def test_kubernetes_manifest_matches_settings(name):
    deployment, service = read_yaml(name)
    template = deployment["spec"]["template"]
    [container] = template["spec"]["containers"]
    labels = deployment["spec"]["selector"]["matchLabels"]
    assert labels == template["metadata"]["labels"] == service["spec"]["selector"]
    port = container["ports"][0]["containerPort"]
    assert service["spec"]["ports"][0]["targetPort"] == port == Settings().port
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["port"] == port
    [mount] = container["volumeMounts"]
    assert container["args"][0].partition("=")[2].startswith(mount["mountPath"])
    assert template["spec"]["terminationGracePeriodSeconds"] > Settings().grace + Settings().drain


def read_container(name):
    [container] = read_yaml(name)[0]["spec"]["template"]["spec"]["containers"]
    return container


def test_kubernetes_gpu_manifest_requests_one_gpu():
    container = read_container("kubernetes-gpu.yaml")
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 1


def test_kubernetes_manifest_has_token_and_as_many_threads_as_cpus():
    container = read_container("kubernetes.yaml")
    args = cli.parse(["serve", *container["args"]])
    assert str(args.threads) == container["resources"]["limits"]["cpu"]
    [variable] = container["env"]
    assert variable["name"] == TOKEN and variable["valueFrom"]["secretKeyRef"]


def test_number_of_workers_is_limited_by_target():
    arranged = Arrangement(4, 1)
    cpu, cuda = (SimpleNamespace(manifest={"target": name}, dtypes=[]) for name in ("cpu", "cuda"))
    assert limit_workers(arranged, cpu, Settings()) == arranged
    assert limit_workers(arranged, cuda, Settings()) == Arrangement(1, 1)
    assert limit_workers(arranged, cuda, Settings(threads=4)) == Arrangement(1, 4)
    with raises(UsageError, seen=("workers", 4), expected=(1, "cuda")):
        limit_workers(arranged, cuda, Settings(workers=4))


@pytest.mark.parametrize("name", ["causal", "encoder"])
def test_cuda_export_rejects_two_workers(exported_for, name):
    """The number of workers is checked before CUDA."""
    [source] = sources([str(exported_for(name, "cuda")[1])], [])
    with raises(UsageError, seen=("workers", 2), expected=(1, "cuda")):
        make_plan(source, Settings(workers=2), cores=2)


def test_interrupt_while_modules_are_imported_prints_no_traceback():
    code = """
import os, signal, sys
class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == "vanilla_transformer_export.arguments":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupt())
signal.signal(signal.SIGINT, signal.default_int_handler)  # a parallel test run ignores it
from vanilla_transformer_export.__main__ import main
main()
"""
    done = subprocess.run([sys.executable, "-c", code, "serve", "x"], capture_output=True)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, b"")
