"""Tests of the 18 examples in the docstrings of optimum-onnx 0.1.0, on small models.

Each example runs with the classes of this package, and with transformers over the torch checkpoint.
Only the import differs, and torch tensors replace NumPy arrays in transformers.
"""

import pytest
import torch
from heads import close
from PIL import Image
from plain import plain

OURS = "from vanilla_transformer_export.ort_models import {name}"
TORCH = "from transformers import {auto} as {name}"
LOAD = """
from transformers import AutoTokenizer, pipeline
tokenizer = AutoTokenizer.from_pretrained(checkpoint)
model = {name}.from_pretrained(checkpoint)
"""
LOAD_IMAGES = """
from PIL import Image
from transformers import AutoImageProcessor, pipeline
preprocessor = AutoImageProcessor.from_pretrained(checkpoint)
model = {name}.from_pretrained(checkpoint)
"""
PHILIPP = '"My name is Philipp and I live in Germany."'
CUTE = '"Hello, my dog is cute"'
FRANCE = '"The capital of France is [MASK]."'


def forward(text, *outputs):
    results = ", ".join(f"outputs.{name}" for name in outputs)
    return f"""
inputs = tokenizer({text}, return_tensors="np")
outputs = model(**inputs)
result = [{results}]
"""


def piped(task, call):
    return f"""
pipe = pipeline("{task}", model=model, tokenizer=tokenizer)
result = pipe({call})
"""


QUESTION = '"Who was Jim Henson?", "Jim Henson was a nice puppet"'
ANSWER = f"""
inputs = tokenizer({QUESTION}, return_tensors="np")
import torch
start_positions, end_positions = torch.tensor([1]), torch.tensor([3])
outputs = model(**inputs, start_positions=start_positions, end_positions=end_positions)
result = [outputs.start_logits, outputs.end_logits]
"""
CHOOSE = """
num_choices = 4
first_sentence = ["Members of the procession walk down the street."] * num_choices
second_sentence = [
    "A drum line passes by walking down the street playing their instruments.",
    "A drum line has heard approaching them.",
    "A drum line arrives and they're outside dancing and asleep.",
    "A drum line turns the lead singer watches the performance.",
]
inputs = tokenizer(first_sentence, second_sentence, truncation=True, padding=True)
for k, v in inputs.items():
    inputs[k] = [v[i : i + num_choices] for i in range(0, len(v), num_choices)]
inputs = dict(inputs.convert_to_tensors(tensor_type="pt"))
outputs = model(**inputs)
result = [outputs.logits]
"""
ZERO_SHOT = """
onnx_z0 = pipeline("zero-shot-classification", model=model, tokenizer=tokenizer)
sequence_to_classify = "Who are you voting for in 2020?"
candidate_labels = ["Europe", "public health", "politics", "elections"]
result = onnx_z0(sequence_to_classify, candidate_labels, multi_label=True)
"""
SAMPLE = """
inputs = tokenizer("My name is Arthur and I live in", return_tensors="pt")
gen_tokens = model.generate(**inputs, do_sample=True, temperature=0.9, min_length=40, max_length=40)
result = tokenizer.batch_decode(gen_tokens)
"""
TRANSLATE = """
inputs = tokenizer("My name is Eustache and I like to", return_tensors="pt")
gen_tokens = model.generate(**inputs)
result = tokenizer.batch_decode(gen_tokens)
"""
IMAGE = """
inputs = preprocessor(images=Image.open(url), return_tensors="np")
result = [model(**inputs).logits]
"""
IMAGE_PIPELINE = """
pipe = pipeline("image-classification", model=model, feature_extractor=preprocessor)
result = pipe(url)
"""
GENERATED = '"My name is Arthur", max_new_tokens=12, do_sample=False'
EUSTACHE = '"My name is Eustache.", max_new_tokens=12'
EXAMPLES = [
    ("FeatureExtraction", "states", forward(PHILIPP, "last_hidden_state")),
    ("FeatureExtraction", "states", piped("feature-extraction", PHILIPP)),
    ("MaskedLM", "fill-mask", forward(FRANCE, "logits")),
    ("MaskedLM", "fill-mask", piped("fill-mask", FRANCE)),
    ("QuestionAnswering", "answer", ANSWER),
    ("QuestionAnswering", "answer", piped("question-answering", QUESTION)),
    ("SequenceClassification", "classify", forward(CUTE, "logits")),
    ("SequenceClassification", "classify", piped("text-classification", CUTE)),
    ("SequenceClassification", "classify", ZERO_SHOT),
    ("TokenClassification", "tag", forward(PHILIPP, "logits")),
    ("TokenClassification", "tag", piped("token-classification", PHILIPP)),
    ("MultipleChoice", "choose", CHOOSE),
    ("ImageClassification", "images", IMAGE),
    ("ImageClassification", "images", IMAGE_PIPELINE),
    ("CausalLM", "causal", SAMPLE),
    ("CausalLM", "causal", piped("text-generation", GENERATED)),
    ("Seq2SeqLM", "seq2seq", TRANSLATE),
    (
        "Seq2SeqLM",
        "seq2seq",
        piped("translation_en_to_de", '"My name is Eustache.", max_new_tokens=12'),
    ),
]


@pytest.mark.parametrize("suffix, name, example", EXAMPLES)
def test_example_matches_torch(saved, tmp_path, suffix, name, example, capfd):
    exported, url = saved(name), str(tmp_path / "picture.png")
    Image.effect_noise((24, 20), 90).convert("RGB").save(url)
    load = LOAD_IMAGES if name == "images" else LOAD
    results = []
    for line, checkpoint, code in (
        (OURS, exported.directory, example),
        (TORCH, exported.checkpoint, example.replace('"np"', '"pt"')),
    ):
        names = {"checkpoint": str(checkpoint), "url": url}
        auto = "AutoModel" if suffix == "FeatureExtraction" else f"AutoModelFor{suffix}"
        torch.manual_seed(0)
        exec((line + load).format(name=f"ORTModelFor{suffix}", auto=auto) + code, names)
        results.append(plain(names["result"]))
    close(*results, absolute=1e-4)
    assert "is not supported" not in capfd.readouterr().err


def test_all_18_docstring_examples_are_tested():
    assert len(EXAMPLES) == 18
