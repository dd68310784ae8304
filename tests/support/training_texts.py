"""Made-up texts that the tests of training tasks learn, and shapes of their models."""

import random

RANDOM = random.Random(0)
CHOICE = RANDOM.choice
VERSE = "".join(
    f"the {CHOICE(['cat', 'dog'])} {CHOICE(['saw', 'ate', 'hid'])} the "
    f"{CHOICE(['bone', 'mouse', 'hat'])}.\n"
    for _ in range(60)
)
DECODER = dict(
    hidden_size=32,
    intermediate_size=64,
    num_attention_heads=4,
    num_hidden_layers=2,
    dropout=0.0,
    embedding_dropout=0.0,
)
ENCODER = {**DECODER, "num_hidden_layers": 1}
TRAINING = dict(learning_rate=5e-3, save_strategy="no", seed=0)
ENDINGS = [
    f"the {CHOICE(['cat', 'dog', 'fox'])} {CHOICE(['runs', 'sits', 'sees'])}" for _ in range(240)
]
# Second sentences begin with "then". Most documents have one sentence, which can only be drawn as a
# random second sentence.
STORIES = [
    [f"once {first}", f"then {second}"] for first, second in zip(ENDINGS[:80:2], ENDINGS[1:80:2])
]
STORIES += [[f"once {ending}"] for ending in ENDINGS[80:]]
