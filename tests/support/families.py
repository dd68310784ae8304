"""Random models of other families, with small configs that use their switches; what goes in and
comes out of them."""

import itertools
import random

import pytest
import torch
import transformers
from transformers import BartConfig, BartForConditionalGeneration

import vanilla_transformer
from vanilla_transformer.configuration_vanilla_transformer import pair
from vanilla_transformer.conversion import FAMILIES, convert
from vanilla_transformer.conversion.converter import get_converter

# of each: theirs, with ours
ARCHITECTURES = {family: get_converter(family).ARCHITECTURES for family in FAMILIES}
BACK = {family: ARCHITECTURES[family] for family in FAMILIES if FAMILIES[family].converts_back}
# families that share all code with another one
TWINS = [family for family in FAMILIES if FAMILIES[family].like]
T5 = ("t5", "mt5")
LLAMAS = ("llama", "qwen2", "qwen3", "mistral", "eurobert", "gemma3_text")
# norms, angles or scales in float32 limit the precision of float64
FLOAT32_NORMS = (*T5, *LLAMAS, "modernbert", "nomic_bert", "gte", "deberta-v2")
LENGTHS = [7, 3, 5]
RIGHT = torch.tensor([[1] * length + [0] * (7 - length) for length in LENGTHS])


def name_of(values):
    dtype, seed = values
    return f"{str(dtype).removeprefix('torch.')}-{seed}"


def cases(architectures):
    """Return a test parameter (family, name) for all names of `architectures`, {family: names}.

    Without the slow tests there are base models, language models and classifiers of sequences, and
    only the language model of a family that shares all code with another.
    """
    quick = {family: ("Model", "SequenceClassification") for family in architectures}
    quick |= dict.fromkeys(TWINS, ())
    return [
        pytest.param(
            family,
            name,
            marks=() if name.endswith(LANGUAGE_MODELS + quick[family]) else pytest.mark.slow,
        )
        for family, names in architectures.items()
        for name in names
    ]


# Of tied and untied models: one in each precision, and the other two with the slow tests only.
TIED, UNTIED = (torch.float32, 0), (torch.float64, 1)
OTHERS = [(torch.float32, 1), (torch.float64, 0)]
DTYPES_AND_SEEDS = pytest.mark.parametrize(
    "dtype, seed",
    [pytest.param(*values, id=name_of(values)) for values in (TIED, UNTIED)]
    + [pytest.param(*values, id=name_of(values), marks=pytest.mark.slow) for values in OTHERS],
)


# Language models, whose head may be the embeddings, are tied and untied in `every_class_once`.
LANGUAGE_MODELS = ("MaskedLM", "CausalLM", "LMHeadModel", "MTModel", "ConditionalGeneration")


def every_class_once(architectures):
    """Return parameters (family, name, dtype, seed) for all names of `architectures`.

    `LANGUAGE_MODELS` are tied and untied, and so is a family's only class. Other heads, which share
    all but a layer with these, are one of both in turn, and both with the slow tests.
    """
    parameters = []
    for family, names in architectures.items():
        turn = itertools.cycle([(TIED,), (UNTIED,)])
        for name in names:
            is_both = name.endswith(LANGUAGE_MODELS) or len(names) == 1
            quick = (TIED, UNTIED) if is_both else next(turn)
            is_twin = family in TWINS and not name.endswith(("MaskedLM", "ConditionalGeneration"))
            for values in (TIED, UNTIED, *OTHERS):
                slow = () if values in quick and not is_twin else pytest.mark.slow
                label = f"{family}-{name}-{name_of(values)}"
                parameters.append(pytest.param(family, name, *values, marks=slow, id=label))
    return pytest.mark.parametrize("family, architecture, dtype, seed", parameters)


SEEDS = pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])


def random_config(family, architecture, seed):
    """Return a small config of `family` for the class `architecture`, in its own field names.

    It has odd numbers of heads and random values of the switches that can be represented. `seed`
    determines them; with an even one embeddings are tied.
    """
    config_class = transformers.CONFIG_MAPPING[family]
    names = config_class().to_dict()
    rng = random.Random(f"{family} {seed}")
    heads, vocabulary, positions = rng.choice([1, 3, 5]), rng.randint(30, 60), rng.randint(24, 40)
    width = heads * rng.choice([4, 6, 8])
    act = rng.choice(["gelu", "relu", "silu", "gelu_new"])
    # embeddings
    narrow = 5 if seed % 2 == 0 or architecture.endswith(("MaskedLM", "CausalLM")) else width
    common = dict(vocab_size=vocabulary, tie_word_embeddings=seed % 2 == 0)
    if family == "nomic_bert":  # which is always tied
        common.pop("tie_word_embeddings")
    is_pair = architecture.endswith(("QuestionAnswering", "AlbertForPreTraining"))
    labels = dict(num_labels=2 if is_pair else 3)
    if "patch_size" in names:
        fields = dict(
            hidden_size=width, num_hidden_layers=rng.randint(1, 3), hidden_act=act,
            num_attention_heads=heads, layer_norm_eps=rng.choice([1e-12, 1e-5]),
            num_channels=rng.choice([1, 3]), qkv_bias=seed % 2 == 0, image_size=13, patch_size=4,
        )  # fmt: skip
        # which interpolates what is no square, in float32 and as if it were one
        if family == "dinov2":
            return config_class(**labels, **fields, mlp_ratio=rng.choice([2, 3]))
        fields |= dict(image_size=rng.choice([13, [8, 15]]), patch_size=rng.choice([4, [4, 5]]))
        fields |= dict(
            intermediate_size=rng.randint(10, 30), pooler_act=rng.choice(["tanh", "relu"])
        )
        return config_class(**labels, **fields)
    if "type_vocab_size" in names:  # as BERT
        fields = dict(
            hidden_size=width, intermediate_size=rng.randint(10, 30),
            num_hidden_layers=rng.randint(1, 3), num_attention_heads=heads, hidden_act=act,
            max_position_embeddings=positions, type_vocab_size=rng.choice([1, 2, 3]),
            layer_norm_eps=rng.choice([1e-12, 1e-5]),
        )  # fmt: skip
        fields |= dict(embedding_size=narrow) if "embedding_size" in names else {}
        if family == "albert":
            fields |= dict(embedding_size=5)
        if family in ("nomic_bert", "gte"):
            rope = {"rope_type": "linear", "factor": 2.5, "rope_theta": rng.choice([77.0, 1e5])}
            fields |= dict(rope_parameters=[None, rope][seed % 2], pad_token_id=1)
        if family == "deberta-v2":
            fields |= dict(
                relative_attention=True, share_att_key=True, norm_rel_ebd="layer_norm",
                pos_att_type="p2c|c2p", position_biased_input=False, pooler_hidden_act=act,
                position_buckets=rng.choice([4, 7]), max_relative_positions=rng.choice([-1, 6]),
            )  # fmt: skip
    elif family == "modernbert":
        bases = {"full_attention": {"rope_theta": 1e5}, "sliding_attention": {"rope_theta": 300.0}}
        fields = dict(
            hidden_size=width, intermediate_size=rng.randint(10, 30), num_hidden_layers=3,
            num_attention_heads=heads, hidden_activation=act, norm_eps=rng.choice([1e-6, 1e-3]),
            max_position_embeddings=positions, local_attention=rng.choice([2, 4]),
            global_attn_every_n_layers=rng.choice([2, 3]), classifier_activation="silu",
            norm_bias=seed % 2 == 1, attention_bias=seed % 2 == 1, mlp_bias=seed % 2 == 1,
            classifier_bias=seed % 2 == 1, rope_parameters=bases, decoder_bias=seed % 2 == 0,
            classifier_pooling=["cls", "mean"][seed % 2], pad_token_id=0, bos_token_id=1,
            eos_token_id=2, cls_token_id=1, sep_token_id=2,
        )  # fmt: skip
    elif family == "mpnet":
        fields = dict(
            hidden_size=width, intermediate_size=rng.randint(10, 30),
            num_hidden_layers=rng.randint(1, 3), num_attention_heads=heads, hidden_act=act,
            max_position_embeddings=positions, pad_token_id=rng.choice([0, 1]),
        )  # fmt: skip
    elif family == "distilbert":
        fields = dict(
            dim=width, hidden_dim=rng.randint(10, 30), n_layers=rng.randint(1, 3), n_heads=heads,
            activation=act, max_position_embeddings=positions,
            sinusoidal_pos_embds=rng.random() < 0.5,
        )  # fmt: skip
    elif family == "gpt2":
        fields = dict(
            n_embd=width, n_inner=rng.choice([None, 17]), n_layer=rng.randint(1, 3), n_head=heads,
            n_positions=positions, activation_function=act, scale_attn_weights=rng.random() < 0.5,
            bos_token_id=1, eos_token_id=2, scale_attn_by_inverse_layer_idx=rng.random() < 0.5,
            reorder_and_upcast_attn=rng.random() < 0.5, pad_token_id=0,
            layer_norm_epsilon=[1e-5, 1e-2][seed % 2],
        )  # fmt: skip
    elif family == "biogpt":
        fields = dict(
            hidden_size=width, intermediate_size=rng.randint(10, 30),
            num_hidden_layers=rng.randint(1, 3), num_attention_heads=heads, hidden_act=act,
            max_position_embeddings=positions, scale_embedding=rng.random() < 0.5,
        )  # fmt: skip
    elif family == "xglm":
        fields = dict(
            d_model=width, ffn_dim=rng.randint(10, 30), num_layers=rng.randint(1, 3),
            attention_heads=heads, max_position_embeddings=positions, activation_function=act,
            scale_embedding=rng.random() < 0.5, pad_token_id=rng.choice([1, 3]),
        )  # fmt: skip
    elif family == "opt":
        norm_first = rng.random() < 0.5
        fields = dict(
            hidden_size=width, ffn_dim=rng.randint(10, 30), num_hidden_layers=rng.randint(1, 3),
            num_attention_heads=heads, max_position_embeddings=positions, activation_function=act,
            word_embed_proj_dim=narrow, do_layer_norm_before=norm_first,
            enable_bias=rng.random() < 0.5,
            _remove_final_layer_norm=norm_first and rng.random() < 0.5,
        )  # fmt: skip
    elif family in LLAMAS:
        groups, layers = heads, rng.randint(1, 3)
        heads *= rng.choice([1, 2])
        kinds = [rng.choice(["full_attention", "sliding_attention"]) for _ in range(layers)]
        rope = {"rope_type": "linear", "factor": 4.0, "rope_theta": rng.choice([500, 1e6])}
        fields = dict(
            hidden_size=width * 2, intermediate_size=rng.randint(10, 30), num_attention_heads=heads,
            num_hidden_layers=layers, num_key_value_heads=groups, hidden_act=act,
            max_position_embeddings=positions, rms_norm_eps=rng.choice([1e-6, 1e-3]),
            head_dim=rng.choice([4, 10]), rope_parameters=rope, pad_token_id=0, bos_token_id=1,
            eos_token_id=2, attention_bias=seed % 2 == 1, mlp_bias=seed % 2 == 1,
            sliding_window=rng.choice([4, 5]), use_sliding_window=True, layer_types=kinds,
            classifier_pooling="bos", use_bidirectional_attention=True, hidden_activation=act,
            query_pre_attn_scalar=7,
        )  # fmt: skip
        if family == "eurobert":
            fields["mlp_bias"] = False
        if family == "gemma3_text":
            sliding = {"rope_type": "default", "rope_theta": 300.0}
            fields["rope_parameters"] = {"full_attention": rope, "sliding_attention": sliding}
        fields = {name: value for name, value in fields.items() if name in names}
    elif family in T5:
        # heads that together are of another width; a scale of queries that no rounding changes
        # at least those of the decoder, for which theirs makes as many caches
        layers = rng.randint(1, 3)
        fields = dict(
            d_model=width, d_kv=rng.choice([4, 16]), num_heads=heads, d_ff=rng.randint(10, 30),
            num_layers=layers, num_decoder_layers=rng.randint(1, layers),
            feed_forward_proj=["gated-gelu", "relu", "gated-silu"][seed % 3],
            relative_attention_num_buckets=8, relative_attention_max_distance=6,
            decoder_start_token_id=0,
        )  # fmt: skip
    else:
        inner = rng.randint(10, 30)
        fields = dict(
            d_model=width, encoder_layers=rng.randint(1, 3), decoder_layers=rng.randint(1, 3),
            encoder_ffn_dim=inner, decoder_ffn_dim=inner, encoder_attention_heads=heads,
            decoder_attention_heads=heads, activation_function=act,
            max_position_embeddings=positions, scale_embedding=rng.random() < 0.5,
            decoder_start_token_id=2,
        )  # fmt: skip
        if family == "marian":
            last = vocabulary - 1
            fields |= dict(
                pad_token_id=last,
                decoder_start_token_id=last,
                eos_token_id=0,
                forced_eos_token_id=0,
            )
            fields |= dict(
                share_encoder_decoder_embeddings=rng.random() < 0.5, decoder_vocab_size=vocabulary
            )
        if family == "m2m_100":
            fields |= dict(pad_token_id=rng.choice([0, 1, 3]), encoder_layerdrop=0.05)
    return config_class(**common, **labels, **fields)


def random_model(architecture, config, dtype=torch.float32):
    """Return a transformers model of the class `architecture`, in evaluation mode.

    Every parameter and buffer has its own values, biases and norms too.
    """
    transformers.set_seed(0)
    model = getattr(transformers, architecture)(config).to(dtype).eval()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if is_sinusoidal(name, config):
                frequencies = 10000 ** (
                    -torch.arange(config.d_model // 2).double() * 2 / config.d_model
                )
                angles = torch.arange(len(tensor)).double()[:, None] * frequencies
                tensor.copy_(torch.cat([angles.sin(), angles.cos()], dim=1))
            else:
                tensor.uniform_(-0.4, 0.4)
        for module in model.modules():
            is_norm = type(module).__name__.endswith(("LayerNorm", "RMSNorm"))
            if is_norm and module.weight is not None:
                module.weight += 1  # around 1, so that what is in front of it stays visible
    return model


def is_sinusoidal(name, config):
    return config.model_type in ("marian", "pegasus") and "embed_positions" in name


def make_arguments(model, position_ids=None):
    """Return random arguments of `forward`, with rows of several lengths padded on the right.

    `position_ids` is not used.
    """
    config = model.config
    if model.main_input_name == "pixel_values":
        size = (config.num_channels, *pair(config.image_size))
        return dict(pixel_values=torch.randn(3, *size, dtype=next(model.parameters()).dtype))
    pad = config.pad_token_id if config.pad_token_id is not None else 0
    first, last = (
        (1, config.vocab_size - 2) if config.model_type == "marian" else (4, config.vocab_size - 1)
    )
    ids = torch.randint(first, last, RIGHT.shape).masked_fill(RIGHT == 0, pad)
    arguments = dict(input_ids=ids, attention_mask=RIGHT)
    if getattr(config, "type_vocab_size", 0):
        arguments["token_type_ids"] = torch.randint(0, config.type_vocab_size, RIGHT.shape)
    if "MultipleChoice" in type(model).__name__:
        return {
            name: torch.stack([tensor, tensor.flip(0)], dim=1) for name, tensor in arguments.items()
        }
    if config.is_encoder_decoder and not reads_twice(model):
        arguments["decoder_input_ids"] = torch.randint(first, last, (3, 6))
    if reads_twice(model):
        arguments["input_ids"][torch.arange(3), torch.tensor(LENGTHS) - 1] = config.eos_token_id
    # as `BartForCausalLM`
    is_half = type(model).__name__.endswith("ForCausalLM") and hasattr(config, "decoder_layers")
    if getattr(config, "add_cross_attention", False) or is_half:
        dtype = next(model.parameters()).dtype
        arguments |= dict(encoder_hidden_states=torch.randn(3, 4, config.hidden_size, dtype=dtype))
        arguments["use_cache"] = False  # theirs makes as many caches as there are encoder layers
        arguments["encoder_attention_mask"] = torch.tensor(
            [[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0]]
        )
    return arguments


def reads_twice(model):
    """Return True for heads whose decoder reads the source too."""
    return model.config.is_encoder_decoder and type(model).__name__.endswith(
        ("ForSequenceClassification", "ForQuestionAnswering")
    )


def compute_outputs(model, arguments):
    """Return {name: tensor} of all outputs for `arguments` that both families return.

    Padding is left out.
    """
    with torch.no_grad():
        outputs = model(**arguments)
    tensors = {}
    for name in (
        "last_hidden_state",
        "pooler_output",
        "logits",
        "start_logits",
        "end_logits",
        "prediction_logits",
    ):
        if outputs.get(name) is not None:
            tensors[name] = outputs[name]
    for name in ("seq_relationship_logits", "sop_logits"):  # of ALBERT
        if name in outputs:
            tensors["seq_relationship_logits"] = outputs[name]
    if "decoder_input_ids" in arguments or "pixel_values" in arguments:
        return tensors
    mask = arguments["attention_mask"].bool()
    per_token = mask.shape if mask.ndim == 2 else ()
    return {
        name: tensor[mask] if tuple(tensor.shape[:2]) == tuple(per_token) else tensor
        for name, tensor in tensors.items()
    }


def assert_exact(got, expected, dtype, family=None):
    tolerance = 1e-10 if dtype == torch.float64 else 1e-5
    sizes = expected.abs().clamp(min=1)
    if family in FLOAT32_NORMS and dtype == torch.float64:
        tolerance, sizes = 1e-6, sizes.max()
    error = (got - expected).abs() / sizes
    assert got.shape == expected.shape and error.max() <= tolerance, f"error {error.max():.1e}"


def converted(model, tmp_path, dtype=torch.float32):
    """Save `model`, convert it, and return ours, which must have all weights and the `dtype`."""
    model.save_pretrained(tmp_path / "theirs")
    result = convert(tmp_path / "theirs", tmp_path / "ours")
    ours, info = getattr(vanilla_transformer, result["architecture"]).from_pretrained(
        tmp_path / "ours", output_loading_info=True
    )
    assert not any(info.values()), info
    assert ours.dtype == dtype
    return ours.eval()


def bart(vocab_size):
    config = BartConfig(
        vocab_size=vocab_size, d_model=16, encoder_layers=1, decoder_layers=1,
        encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=16,
        decoder_ffn_dim=16, max_position_embeddings=300, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, decoder_start_token_id=2, forced_eos_token_id=2, init_std=0.5,
    )  # fmt: skip
    return BartForConditionalGeneration(config)
