"""Tests of the page at `/` in a browser: each head on a small and on a large screen."""

import pytest
from playwright.sync_api import expect

WIDTHS = {360: dict(width=360, height=740), 1280: dict(width=1280, height=800)}
ENGLISH = "A dog runs across a green field. Two men are sleeping in the park."
CONTEXT = "the big dog finds a red bird, the film wins."
# model: {name of a field: text to type}, in the order of the Tab key
TYPED = {
    "translator-en-de": {"Text": ENGLISH},
    "poet": {"Beginning of the text": "ROMEO:\n"},
    "opinions": {"Text": "A warm and funny film that never bores."},
    "names": {"Text": "\U0001f600 the old man sees a red bird"},
    "answers": {"Question": "who sees a bird?", "Text with the answer": CONTEXT},
    "masks": {"Text with a mask": "the big <mask> finds a bird"},
    "vectors": {"First text": "the dog finds a bird", "Second text": "who sees the old man?"},
}


@pytest.fixture(params=WIDTHS, ids=str)
def page(request, chromium, server):
    context = chromium.new_context(
        viewport=WIDTHS[request.param], color_scheme="dark" if request.param > 1000 else "light"
    )
    found = context.new_page()
    found.width, found.complaints, found.places = request.param, [], set()
    found.on("console", lambda message: found.complaints.append(message.text))
    found.on("pageerror", lambda error: found.complaints.append(str(error)))
    found.on("request", lambda request: found.places.add(request.url.split("/")[2]))
    found.goto(server.url)
    yield found
    context.close()


def select_model(page, model):
    page.get_by_role("combobox", name="Model").select_option(model)


def wait_for_output(page):
    expect(page.get_by_role("status")).to_contain_text("done in", timeout=30_000)
    return page.locator("#output")


def send(page, model):
    """Fill in and send the form of `model` with the keyboard only, and return the output."""
    select_model(page, model)
    page.get_by_role("combobox", name="Model").focus()
    for name, text in TYPED[model].items():
        page.keyboard.press("Tab")
        expect(page.get_by_role("textbox", name=name, exact=True)).to_be_focused()
        page.keyboard.insert_text(text.replace("<mask>", page.evaluate("model.mask ?? ''")))
    page.keyboard.press("Control+Enter")
    return wait_for_output(page)


def read_bars(output):
    """Return [(label, displayed score)] of the bars in `output`."""
    return [
        tuple(item.locator("> span").all_inner_texts()[:2]) for item in output.locator("li").all()
    ]


def percent(score):
    return f"{100 * score:.1f} %"


def translate(server, text):
    """Return the server's greedy translation of `text`.

    The page streams such a translation, although the generation config has five beams.
    """
    path = "/models/translator-en-de/predict/translation"
    [answer] = server.post(path, inputs=text, parameters={"num_beams": 1})
    return answer["translation_text"]


def test_translation_is_shown_with_its_language(page, server):
    found = send(page, "translator-en-de")
    assert found.inner_text() == translate(server, ENGLISH)
    assert found.locator("p").get_attribute("lang") == "de"


def origins(page):
    """Return (word of the translation, words of the source) that are highlighted now."""
    target = page.locator("#output .shown").all_inner_texts()
    return "".join(target), page.locator("#origin .shown").all_inner_texts()


def aligned_words(server, text, translation):
    """Return [(word of `translation`, word of `text`)] in order, of the server's greedy search."""
    path = "/models/translator-en-de/predict/translation"
    parameters = {"num_beams": 1, "return_alignments": True}
    [answer] = server.post(path, inputs=text, parameters=parameters)
    assert answer["translation_text"] == translation
    return [(translation[slice(*one)], text[slice(*other)]) for other, one in answer["alignments"]]


def test_source_words_are_shown_for_a_word_that_is_pointed_at(page, server, shots):
    found = send(page, "translator-en-de")
    text = f"{ENGLISH} \U0001f600 A dog."  # places are counted in characters of Unicode
    page.get_by_role("textbox", name="Text").fill(text)
    page.keyboard.press("Control+Enter")
    expect(page.locator("#origin p")).to_have_text(text)
    expected = aligned_words(server, text, found.inner_text())
    words = found.locator(".word")
    assert words.all_inner_texts() == [word for word, _ in expected] and len(expected) > 10
    for number in (1, 3, len(expected) - 2):
        words.nth(number).hover()
        assert origins(page) == (expected[number][0], [expected[number][1]])
    page.screenshot(path=shots / f"origins-{page.width}.png", full_page=True)
    page.get_by_role("heading", level=1).hover()
    assert origins(page) == ("", [])
    assert page.complaints == []


def test_source_words_are_shown_for_a_word_that_has_the_focus(page, server):
    found = send(page, "translator-en-de")
    expected = aligned_words(server, ENGLISH, found.inner_text())
    page.get_by_role("button", name="Translate").focus()
    page.keyboard.press("Tab")
    place = 0
    keys = {"ArrowRight": 1, "ArrowLeft": -1, "Home": -99, "End": 99}
    for key in (
        "",
        "ArrowRight",
        "ArrowRight",
        "ArrowLeft",
        "End",
        "ArrowRight",
        "Home",
        "ArrowLeft",
    ):
        if key:
            page.keyboard.press(key)
        place = min(max(place + keys.get(key, 0), 0), len(expected) - 1)
        assert origins(page) == (expected[place][0], [expected[place][1]])
        focused = page.locator(":focus")
        described = page.locator(f"#{focused.get_attribute('aria-describedby')}")
        assert described.inner_text() == expected[place][1]
    assert found.locator("[tabindex='0']").count() == 1
    select_model(page, "poet")
    expect(page.locator("#origin")).to_be_hidden()


def test_continuation_is_shown_after_prompt(page, server):
    found = send(page, "poet")
    page.get_by_role("spinbutton", name="Maximum new tokens").fill("9")
    page.get_by_role("button", name="Continue").click()
    wait_for_output(page)
    expected = server.post(
        "/models/poet/v1/completions", model="poet", prompt="ROMEO:\n", max_tokens=9, temperature=0
    )["choices"][0]["text"]
    assert found.text_content() == "ROMEO:\n" + expected


def test_labels_are_shown_as_bars(page, server):
    expected = server.post(
        "/models/opinions/predict/text-classification", inputs=TYPED["opinions"]["Text"]
    )
    rows = expected[0] if isinstance(expected[0], list) else expected
    found = send(page, "opinions")
    assert (
        read_bars(found)[0] == (rows[0]["label"], percent(rows[0]["score"]))
        and len(read_bars(found)) == 2
    )
    widths = [bar.bounding_box()["width"] for bar in found.locator(".bar > span").all()]
    assert widths[0] > widths[1]


def test_entities_are_marked_in_text(page, server):
    text = TYPED["names"]["Text"]
    parameters = {"aggregation_strategy": "simple"}
    expected = server.post(
        "/models/names/predict/token-classification", inputs=text, parameters=parameters
    )
    found = send(page, "names")
    marks = [
        mark.evaluate("mark => [mark.firstChild.data, mark.lastChild.textContent]")
        for mark in found.locator("mark").all()
    ]
    assert (
        marks
        == [[text[entry["start"] : entry["end"]], entry["entity_group"]] for entry in expected]
        and marks
    )


def test_answer_is_highlighted_in_context(page, server):
    inputs = dict(zip(("question", "context"), TYPED["answers"].values()))
    expected = server.post("/models/answers/predict/question-answering", inputs=inputs)
    expected = expected[0] if isinstance(expected, list) else expected
    found = send(page, "answers")
    assert found.locator("mark").inner_text() == CONTEXT[expected["start"] : expected["end"]]
    assert read_bars(found) == [(expected["answer"], percent(expected["score"]))]
    assert found.locator("p").inner_text() == CONTEXT


def test_mask_tokens_are_shown_with_scores(page, server):
    found = send(page, "masks")
    text = page.get_by_role("textbox", name="Text with a mask").input_value()
    expected = server.post("/models/masks/predict/fill-mask", inputs=text)
    assert read_bars(found) == [(entry["token_str"], percent(entry["score"])) for entry in expected]
    assert found.locator("small").first.inner_text() == expected[0]["sequence"]


def test_button_inserts_mask_token(page):
    select_model(page, "masks")
    field = page.get_by_role("textbox", name="Text with a mask")
    field.fill("the big ")
    page.get_by_role("button", name="Insert mask").click()
    assert field.input_value() == f"the big {page.evaluate('model.mask')}"
    expect(field).to_be_focused()


def test_cosine_similarity_of_two_texts_is_shown(page, server):
    texts = list(TYPED["vectors"].values())
    answer = server.post(
        "/models/vectors/v1/embeddings", model="vectors", input=texts, encoding_format="float"
    )
    one, other = (entry["embedding"] for entry in answer["data"])
    norms = sum(value * value for value in one) * sum(value * value for value in other)
    cosine = sum(first * second for first, second in zip(one, other)) / norms**0.5
    assert read_bars(send(page, "vectors")) == [("Cosine similarity", f"{cosine:.3f}")]


@pytest.mark.parametrize("model", TYPED)
def test_page_fits_screen_and_logs_no_errors(page, model, shots):
    send(page, model)
    page.screenshot(path=shots / f"{model}-{page.width}.png", full_page=True)
    assert page.evaluate("document.documentElement.scrollWidth") <= page.width
    assert page.complaints == [] and len(page.places) == 1  # all requests went to one server
    small = (
        "elements => elements.filter(each => each.offsetParent && each.offsetHeight < 44).map(each "
        "=> each.outerHTML)"
    )
    # controls are at least 44 pixels high
    assert page.eval_on_selector_all("button, input, select, textarea", small) == []


def test_markup_in_text_is_escaped(page):
    select_model(page, "names")
    page.get_by_role("textbox", name="Text").fill("<img src=x onerror=alert(1)> the old <b>man</b>")
    page.keyboard.press("Control+Enter")
    found = wait_for_output(page)
    assert (
        found.locator("img, b").count() == 0
        and "<b>" in found.text_content()
        and page.complaints == []
    )


def test_error_is_shown_and_hidden_after_next_answer(page):
    select_model(page, "poet")
    field = page.get_by_role("textbox", name="Beginning of the text")
    field.fill("to be " * 200)
    page.get_by_role("button", name="Continue").click()
    expect(page.get_by_role("alert")).to_contain_text("1200 tokens, expected at most")
    field.fill("to be")
    page.get_by_role("button", name="Continue").click()
    wait_for_output(page)
    expect(page.get_by_role("alert")).to_be_hidden()


def test_answer_is_streamed_and_can_be_stopped(page, server):
    """The first part is shown while the rest of the stream is held back."""
    page.evaluate(
        """() => {
            const real = window.fetch;
            window.fetch = async (...given) => {
                const answer = await real(...given);
                if (!String(given[0]).endsWith('page/stream')) return answer;
                const reader = answer.body.getReader();
                const { signal } = given[1];
                const stopped = new Promise(
                    (done, stop) => signal.addEventListener('abort', stop)
                );
                let count = 0;
                const slow = new ReadableStream({
                    async pull(controller) {
                        if (count++ === 1) await stopped;
                        const { value } = await reader.read();
                        const ends = (byte, place) => byte === 10 && value[place + 1] === 10;
                        // One event: on a busy machine all may come together.
                        controller.enqueue(value.slice(0, value.findIndex(ends) + 2));
                    },
                });
                return new Response(slow);
            };
        }"""
    )
    select_model(page, "translator-en-de")
    page.get_by_role("textbox", name="Text").fill(ENGLISH)
    page.get_by_role("button", name="Translate").click()
    output = page.locator("#output")
    expect(output).not_to_be_empty()
    expected, shown = translate(server, ENGLISH), output.inner_text()
    assert expected.startswith(shown) and 0 < len(shown) < len(expected)
    assert output.get_attribute("aria-busy") == "true"
    expect(page.get_by_role("status")).to_have_text("working ...")
    page.get_by_role("button", name="Stop").click()
    expect(page.get_by_role("status")).to_have_text("stopped")
    assert output.get_attribute("aria-busy") == "false"


def test_page_asks_for_server_token(chromium, exports, server, start_server, tmp_path):
    protected = start_server(
        [exports["translator-en-de"]], tmp_path / "log", VANILLA_TRANSFORMER_TOKEN="secret"
    )
    page = chromium.new_page()
    page.goto(protected.url)
    expect(page.get_by_role("alert")).to_contain_text("token")
    page.get_by_role("textbox", name="Token of the server").fill("secret")
    page.get_by_role("button", name="Use this token").click()
    page.get_by_role("textbox", name="Text", exact=True).fill("A dog runs.")
    page.get_by_role("button", name="Translate").click()
    expect(page.locator("#output")).to_have_text(translate(server, "A dog runs."))
    page.close()
    protected.stop()
