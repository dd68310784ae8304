"""Tests of models that are loaded and unloaded while the server runs, with Triton's client."""

import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import pytest
import tritonclient.http as triton
from checkpoints import copy_folder, list_file
from command_line import COMMAND, read_error
from messages import check_message, raises
from served import served_exports, wait_for
from serving_load import with_words
from tritonclient.utils import InferenceServerException

from vanilla_transformer_export import TextRuntime
from vanilla_transformer_export.engine.limits import Admission, slot_bytes, spare_rows
from vanilla_transformer_export.engine.model import open_export, weight_bytes
from vanilla_transformer_export.errors import UsageError
from vanilla_transformer_export.serving import service
from vanilla_transformer_export.serving.models import READY, UNLOADED
from vanilla_transformer_export.serving.settings import Settings, sources

TOKEN = b"a-token"
HEADERS = {"Authorization": "Bearer a-token"}


@pytest.fixture(scope="module")
def exports(exported, exported_for, tmp_path_factory):
    """{name: directory} of an embedder, a classifier, a translator and a decoder."""
    directories = {
        "embedder": exported("encoder").directory,
        "classifier": exported("classification").directory,
        "translator": exported_for("seq2seq", "cpu")[1],
        "poet": exported_for("causal", "cpu")[1],
    }
    return {
        name: with_words(directory, tmp_path_factory.mktemp(name))
        for name, directory in directories.items()
    }


@contextlib.contextmanager
def serving(exports, token=TOKEN, languages=(), **settings):
    """Yield a server of `exports`, {name: directory}, whose engines run in this process."""
    named = [f"{name}={path}" for name, path in exports.items()]
    settings = {"grace": 0.01, "threads": 1, "languages": languages} | settings
    with (
        served_exports(*named, token=token, **settings) as server,
        httpx.Client(base_url=server.url, headers=HEADERS, timeout=60) as server.client,
    ):
        yield server


def states(server):
    return server.client.get("/health").json()["models"]


def embed(client, text="w5 w9", name="embedder"):
    return client.post("/embed", json={"inputs": text, "model": name})


def triton_texts():
    """Return the input `text` of Triton's client with two rows."""
    values = np.array(["w5 w9", "w30"], object)
    result = triton.InferInput("text", values.shape, "BYTES")
    result.set_data_from_numpy(values)
    return [result]


def model_of(server, name):
    return server.server.service.models.models[name]


# -------------------------------------------------------------------------------------- lazy


def test_lazy_models_are_described_without_loading_and_load_at_first_request(exports):
    with serving(exports, lazy=True, languages=(("translator", "en", "de"),)) as server:
        client = server.client
        assert set(states(server).values()) == {"unloaded"}
        assert [line.split(":")[0] for line in server.lines[1:-1]] == [*exports]
        assert all("first request" in line for line in server.lines[1:-1])
        listed = [model["id"] for model in client.get("/v1/models").json()["data"]]
        paged = [model["name"] for model in client.get("/page/models").json()]
        assert listed == paged == [*exports]
        assert client.get("/v1/models/poet").json()["id"] == "poet"
        languages = client.get("/languages").json()
        before = {
            path: client.get(path).json()
            for path in (
                *("/models/embedder/info", "/models/classifier/info"),
                *(f"/v2/models/{name}" for name in exports),
            )
        }
        assert set(states(server).values()) == {"unloaded"}
        assert client.get("/v2/models/embedder/ready").status_code == 400
        loaded = 'vanilla_transformer_model_loaded{model="embedder"} '
        assert loaded + "0.0" in client.get("/metrics").text

        runtime = TextRuntime(exports["embedder"], threads=1)
        [expected] = runtime.embed(["w5 w9"])
        expected /= np.linalg.norm(expected)
        assert embed(client).json()[0] == pytest.approx(expected.tolist(), abs=1e-6)
        predicted = client.post("/predict", json={"inputs": "w5", "model": "classifier"})
        body = {"q": "w5 w6", "source": "en", "target": "de"}
        translated = client.post("/translate", json=body).json()
        [expected] = TextRuntime(exports["translator"], threads=1).translate(["w5 w6"])
        assert predicted.status_code == 200 and translated == {"translatedText": expected}
        completed = client.post("/v1/completions", json={"model": "poet", "prompt": "w5"})
        assert completed.status_code == 200
        assert set(states(server).values()) == {"ready"}
        assert client.get("/v2/models/embedder/ready").json() == {"name": "embedder", "ready": True}
        assert loaded + "1.0" in client.get("/metrics").text
        # what is said of a model does not depend on whether it is loaded
        assert {path: client.get(path).json() for path in before} == before
        assert client.get("/languages").json() == languages


def test_wrong_requests_do_not_load_a_model(exports):
    with serving(exports, lazy=True) as server:
        for path, body, status in (
            ("/embed", {"inputs": "w5", "model": "nope"}, 422),
            ("/embed", {"inputs": "w5", "model": "poet"}, 424),
            ("/v1/completions", {"prompt": "w5", "model": "embedder"}, 400),
            ("/predict/no-task", {"inputs": "w5"}, 404),
        ):
            assert server.client.post(path, json=body).status_code == status
        assert set(states(server).values()) == {"unloaded"}


@pytest.mark.parametrize("flags", [[], ["--lazy"]])
def test_directory_that_is_no_export_or_damaged_is_rejected_at_start(flags, exports, tmp_path):
    (tmp_path / "empty").mkdir()
    message = read_error("serve", tmp_path / "empty", *flags)
    check_message(message, seen="empty", expected="vanilla-transformer export")
    damaged = copy_folder(exports["embedder"], tmp_path)
    (damaged / "config.json").write_text("{}")
    message = read_error("serve", damaged, *flags, "--port", "0")
    check_message(message, seen="config.json")
    (damaged / "config.json").unlink()
    check_message(read_error("serve", damaged, *flags, "--port", "0"), seen="config.json")


# ---------------------------------------------------------------------------------- by request


def test_triton_client_loads_and_unloads_models(exports):
    # the client adds its own headers to those that it gets
    with (
        serving(exports, lazy=True) as server,
        triton.InferenceServerClient(f"127.0.0.1:{server.port}") as client,
    ):
        assert "model_repository" in client.get_server_metadata({**HEADERS})["extensions"]
        index = client.get_model_repository_index(headers={**HEADERS})
        assert index == [
            {"name": name, "version": "1", "state": "UNAVAILABLE", "reason": "unloaded"}
            for name in exports
        ]
        for name in ("embedder", "translator"):
            client.load_model(name, headers={**HEADERS})
            client.load_model(name, headers={**HEADERS})
            assert client.is_model_ready(name, headers={**HEADERS})
        ready = server.client.post("/v2/repository/index", json={"ready": True}).json()
        assert ready == [
            {"name": name, "version": "1", "state": "READY", "reason": ""}
            for name in ("embedder", "translator")
        ]
        answer = client.infer("embedder", triton_texts(), headers={**HEADERS}).as_numpy("embedding")
        for name in ("embedder", "translator", "translator"):
            client.unload_model(name, headers={**HEADERS}, unload_dependents=True)
            assert not client.is_model_ready(name, headers={**HEADERS})
        again = client.infer("embedder", triton_texts(), headers={**HEADERS}).as_numpy("embedding")
        assert (answer == again).all()
        for action in (client.load_model, client.unload_model):
            with pytest.raises(InferenceServerException, match="model is 'nope'"):
                action("nope", headers={**HEADERS})
        with pytest.raises(InferenceServerException, match="'config'"):
            client.load_model("poet", headers={**HEADERS}, config="{}", files={"file:1/x": b"x"})
        assert states(server) == dict.fromkeys(exports, "unloaded") | {"embedder": "ready"}


@pytest.mark.parametrize("path", ["index", "models/embedder/load", "models/embedder/unload"])
def test_control_needs_a_token(path, exports):
    url = f"/v2/repository/{path}"
    with serving({"embedder": exports["embedder"]}, token=None) as server:
        answer = server.client.post(url)
        assert answer.status_code == 403
        check_message(answer.json()["error"], expected="--token-file")
        assert server.client.get("/v2").json()["extensions"] == ["binary_tensor_data"]
        assert states(server) == {"embedder": "ready"}


def test_control_rejects_wrong_tokens_and_bodies(exports):
    with serving({"embedder": exports["embedder"]}) as server:
        for path in ("index", "models/embedder/load", "models/embedder/unload"):
            url = f"{server.url}/v2/repository/{path}"
            assert httpx.post(url).status_code == 401
            for body in (b"[]", b"{", b'{"parameters": 5}'):
                answer = server.client.post(url, content=body)
                assert answer.status_code == 400 and "\n" not in answer.json()["error"]
        assert states(server) == {"embedder": "ready"}


def test_models_in_paths_that_are_no_names_are_unknown(exports):
    with serving({"embedder": exports["embedder"]}) as server:
        for name in ("..%2Fembedder", "%2Ftmp", "."):
            answer = server.client.post(f"/v2/repository/models/{name}/load")
            assert answer.status_code == 404, answer.text


# ---------------------------------------------------------------------------------- idle


def test_idle_models_are_unloaded_and_loaded_again(exports):
    names = ("embedder", "translator")
    chosen = {name: exports[name] for name in names}
    with serving(chosen, idle_unload=0.4, languages=((None, "en", "de"),)) as server:
        assert set(states(server).values()) == {"ready"}
        first = embed(server.client).json()
        wait_for(lambda: set(states(server).values()) == {"unloaded"})
        assert embed(server.client).json() == first
        assert states(server)["embedder"] == "ready"
        for _ in range(8):  # requests keep it loaded
            embed(server.client)
            time.sleep(0.1)
            assert states(server) == {"embedder": "ready", "translator": "unloaded"}


# -------------------------------------------------------------------- several at once, errors


@pytest.fixture
def slow_loads(monkeypatch):
    """Loading takes at least 0.3 seconds. Return a list with the name of each load."""
    loads, open_model = [], service.open_model

    async def slowly(source, *args):
        loads.append(source.name)
        await asyncio.sleep(0.3)
        return await open_model(source, *args)

    monkeypatch.setattr(service, "open_model", slowly)
    return loads


def test_requests_at_once_load_a_model_once_and_all_are_answered(exports, slow_loads):
    with serving(exports, lazy=True) as server, ThreadPoolExecutor(8) as pool:
        control = "/v2/repository/models/embedder/load"
        answers = [
            *pool.map(lambda _: embed(server.client), range(6)),
            *pool.map(lambda _: server.client.post(control), range(4)),
        ]
        assert {answer.status_code for answer in answers} == {200}
        assert slow_loads == ["embedder"]


def test_load_goes_on_when_its_client_leaves(exports, slow_loads):
    with serving(exports, lazy=True) as server:
        with contextlib.suppress(httpx.TimeoutException):
            httpx.post(
                f"{server.url}/embed",
                json={"inputs": "w5", "model": "embedder"},
                headers=HEADERS,
                timeout=0.15,
            )
        wait_for(lambda: states(server)["embedder"] == "ready")
        assert slow_loads == ["embedder"] and model_of(server, "embedder").num_requests == 0


def test_unload_while_loading_waits_and_unloads(exports, slow_loads):
    with serving(exports, lazy=True) as server, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(embed, server.client)
        wait_for(lambda: states(server)["embedder"] == "loading")
        assert server.client.post("/v2/repository/models/embedder/unload").status_code == 200
        assert answer.result().status_code == 200
        wait_for(lambda: model_of(server, "embedder").state in (READY, UNLOADED))


def test_unload_waits_for_stream_and_later_requests_load_again(exports):
    length = {"max_tokens": 30, "min_new_tokens": 30}
    body = {"model": "poet", "prompt": "w5", "temperature": 0, "stream": True, **length}
    poet = {"poet": exports["poet"]}
    with serving(poet, workers=1) as server, ThreadPoolExecutor(2) as pool:
        model = model_of(server, "poet")
        engine = model.client.engine
        batch, step = engine.workers[0].batch, engine.workers[0].batch.step
        batch.step = lambda: time.sleep(0.05) or step()
        with server.client.stream("POST", "/v1/completions", json=body) as stream:
            assert stream.status_code == 200, stream.read()
            lines = stream.iter_lines()
            first = next(lines)
            unload = pool.submit(server.client.post, "/v2/repository/models/poet/unload")
            wait_for(lambda: states(server)["poet"] == "unloading")
            plain = {**body, "stream": False}
            later = pool.submit(server.client.post, "/v1/completions", json=plain)
            time.sleep(0.1)
            assert not unload.done() and not later.done()
            events = [line for line in (first, *lines) if line]
        assert events[-1] == "data: [DONE]"
        assert unload.result().status_code == 200
        streamed = "".join(json.loads(line[6:])["choices"][0]["text"] for line in events[:-1])
        assert later.result().json()["choices"][0]["text"] == streamed
        assert model.client.engine is not engine and engine.workers == []


def test_failed_load_is_one_line_and_the_model_loads_later(exports, tmp_path):
    copy = copy_folder(exports["embedder"], tmp_path)
    graph = copy / "onnx" / "model.onnx"
    content = graph.read_bytes()
    with serving({"embedder": copy}, lazy=True) as server:
        graph.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        answer = embed(server.client)
        assert (answer.status_code, answer.headers["Retry-After"]) == (503, "5")
        check_message(answer.json()["error"], seen="embedder")
        assert str(copy) not in answer.text
        answer = server.client.post("/v2/repository/models/embedder/load")
        assert answer.status_code == 400
        check_message(answer.json()["error"], seen=("embedder", "SHA-256"), expected="again")
        [entry] = server.client.post("/v2/repository/index").json()
        assert entry["state"] == "UNAVAILABLE" and "SHA-256" in entry["reason"]
        assert server.client.get("/health").json()["status"] == "ok"
        graph.write_bytes(content)
        assert embed(server.client).status_code == 200
        [entry] = server.client.post("/v2/repository/index").json()
        assert (entry["state"], entry["reason"]) == ("READY", "")


@pytest.mark.parametrize("name", ["config_sentence_transformers.json", "sentence_bert_config.json"])
def test_settings_of_sentence_transformers_are_read_once_for_each_load(exports, tmp_path, name):
    copy = copy_folder(exports["embedder"], tmp_path)
    path = copy / name
    path.write_text('{"max_seq_length": 3, "prompts": {}}')
    list_file(copy, name)
    with serving({"embedder": copy}) as server:
        os.utime(path)
        answer = embed(server.client, "w5 w9 w1 w2")
        assert answer.status_code == server.client.get("/info").status_code == 200
        path.write_text("{")
        assert embed(server.client, "w5 w9 w1 w2").json() == answer.json()
        assert server.client.get("/info").status_code == 200
        server.client.post("/v2/repository/models/embedder/unload")
        assert embed(server.client).status_code == 503
        loaded = server.client.post("/v2/repository/models/embedder/load")
        check_message(loaded.json()["error"], seen=(name, "embedder"))
        path.write_text('{"max_seq_length": 3}')
        assert embed(server.client, "w5 w9 w1 w2").json() == answer.json()


def test_lists_have_a_model_whose_directory_is_gone(exports, tmp_path):
    gone = copy_folder(exports["embedder"], tmp_path / "gone")
    (gone / "sentence_bert_config.json").write_text('{"max_seq_length": 9}')
    list_file(gone, "sentence_bert_config.json")
    models = {"gone": gone, "classifier": exports["classifier"]}
    with serving(models, lazy=True) as server:
        before = server.client.get("/v1/models").json()
        gone.rename(tmp_path / "moved")
        assert server.client.get("/v1/models").json() == before and len(before["data"]) == 2
        facts = server.client.get("/info", params={"model": "gone"}).json()
        assert facts["max_seq_length"] == 9  # it was read at the start
        assert any("gone/sentence_bert_config.json changed" in each for each in facts["warnings"])
        assert embed(server.client, name="gone").status_code == 503
        (tmp_path / "moved").rename(gone)
        assert embed(server.client, name="gone").status_code == 200


def test_replaced_export_is_used_after_unload(exports, tmp_path):
    copy = copy_folder(exports["embedder"], tmp_path)
    with serving({"embedder": copy}) as server:
        shutil.rmtree(copy)
        shutil.copytree(exports["poet"], copy)
        server.client.post("/v2/repository/models/embedder/unload")
        answer = server.client.post("/v2/repository/models/embedder/load")
        assert answer.status_code == 400
        check_message(
            answer.json()["error"], seen="VanillaDecoderForCausalLM", expected="VanillaEncoderModel"
        )
        shutil.rmtree(copy)
        shutil.copytree(exports["embedder"], copy)
        assert server.client.post("/v2/repository/models/embedder/load").status_code == 200


# ---------------------------------------------------------------------------------- memory


def test_memory_of_a_plan_is_that_of_files_and_slots(exports):
    [source] = sources([str(exports["translator"])], [])
    plan = service.make_plan(source, Settings(workers=2, slots=12), cores=2)
    files = {path.name: path.stat().st_size for path in source.directory.rglob("*.*")}
    unused = ("merged", "candidates", "alignment")  # graphs that the server does not open
    run = sum(
        size
        for name, size in files.items()
        if ".onnx" in name and not any(part in name for part in unused)
    )
    info = open_export(source.directory)
    rows = 2 * (6 + spare_rows(6))
    slots = rows * slot_bytes(info, Admission(info, 2, slots=12).slot_size)
    tokenizer = service.TOKENIZER_SHARE * files["tokenizer.json"]
    assert weight_bytes(info) == run
    assert plan.num_bytes == run + slots + tokenizer


def test_models_that_do_not_fit_are_rejected_at_start(exports):
    chosen = {name: exports[name] for name in ("embedder", "classifier")}
    for seen, is_lazy in ((("embedder", "classifier"), False), ("embedder", True)):
        rejected = raises(UsageError, seen=seen, expected="--max-memory")
        with rejected, serving(chosen, max_memory=1000, lazy=is_lazy):
            pass  # the error of the server is raised when it has ended


def test_model_that_does_not_fit_beside_others_is_rejected_until_they_are_unloaded(exports):
    chosen = {name: exports[name] for name in ("embedder", "classifier")}
    with serving(chosen, lazy=True) as server:
        sizes = [model_of(server, name).plan.num_bytes for name in chosen]
    with serving(chosen, max_memory=sum(sizes) - 1, lazy=True) as server:
        predict = {"inputs": "w5", "model": "classifier"}
        assert embed(server.client).status_code == 200
        answer = server.client.post("/predict", json=predict)
        assert answer.status_code == 503 and answer.headers["Retry-After"]
        check_message(
            answer.json()["error"], seen=("classifier", "embedder"), expected="--max-memory"
        )
        assert states(server) == {"embedder": "ready", "classifier": "unloaded"}
        server.client.post("/v2/repository/models/embedder/unload")
        assert server.client.post("/predict", json=predict).status_code == 200


# ------------------------------------------------------------------------------- a process


def test_models_of_the_child_process_are_closed_and_opened_again(exports):
    """The command runs the workers of models that generate in a process of their own."""
    words = [f"{name}={exports[name]}" for name in ("translator", "poet", "embedder")]
    flags = ["--languages", "translator:en-de", "--idle-unload", "0.5", "--lazy", "--port", "0"]
    body = {"q": "w5 w6", "source": "en", "target": "de"}
    [expected] = TextRuntime(exports["translator"], threads=1).translate(["w5 w6"])
    process = subprocess.Popen(
        [COMMAND, "serve", *words, *flags, "--grace", "0.1", "--log-level", "error"],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        url = process.stdout.readline().split()[-1]
        while process.stdout.readline() != "ready\n":
            assert process.poll() is None
        with httpx.Client(base_url=url, timeout=60) as client:
            for _ in range(2):
                answer = client.post("/translate", json=body)
                assert answer.json() == {"translatedText": expected}
                completion = client.post("/v1/completions", json={"model": "poet", "prompt": "w5"})
                assert completion.status_code == embed(client).status_code == 200
                wait_for(
                    lambda: set(client.get("/health").json()["models"].values()) == {"unloaded"}
                )
        process.terminate()
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.communicate()


def test_models_that_load_at_once_share_the_memory(exports, slow_loads):
    chosen = {name: exports[name] for name in ("embedder", "classifier")}
    with serving(chosen, lazy=True) as server:
        sizes = [model_of(server, name).plan.num_bytes for name in chosen]
    with (
        serving(chosen, max_memory=sum(sizes) - 1, lazy=True) as server,
        ThreadPoolExecutor(1) as pool,
    ):
        first = pool.submit(embed, server.client)
        wait_for(lambda: states(server)["embedder"] == "loading")
        body = {"inputs": "w5", "model": "classifier"}
        assert server.client.post("/predict", json=body).status_code == 503
        assert first.result().status_code == 200 and slow_loads == ["embedder"]


def test_model_that_is_loading_is_unloaded_after_that(exports, slow_loads):
    with serving(exports, lazy=True) as server, ThreadPoolExecutor(1) as pool:
        control = "/v2/repository/models/embedder"
        load = pool.submit(server.client.post, f"{control}/load")
        wait_for(lambda: states(server)["embedder"] == "loading")
        assert server.client.post(f"{control}/unload").status_code == 200
        assert states(server)["embedder"] == "unloaded"
        assert load.result().status_code == 200 and slow_loads == ["embedder"]
