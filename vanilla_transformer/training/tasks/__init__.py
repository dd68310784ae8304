"""What a model is trained to do, one module each.

| name | what it is |
|---|---|
| `CONFIG`, `MODEL` | the classes of the model |
| `PIPELINE` | the Hub's name for what the model does |
| `DATA`, `EVALUATION` | the keys of a recipe's tables of these names; all have `skip_bad_rows` (see `data.BadRows`) |
| `FILES` | what each file of a split holds, where a split is a certain number of files |
| `METRICS` | the numbers that `metrics` gives, of which a recipe may name one as the best |
| `read(data, split)` | a `datasets.Dataset` of text for `"train"`, `"validation"` or `"test"`, `None` if the recipe has none |
| `texts(dataset)` | all its text, for a new tokenizer |
| `config_fields(text, data)` | fields of the config that the text (a data set for each split) and `data` determine |
| `encode(columns, tokenizer, data)` | columns of text -> columns of numbers |
| `examples(rows, data, split)` | what the model sees of one split: the rows of numbers, or pieces of them |
| `draw(row, random, tokenizer)` | an example, with what is drawn for it at random; `None` where that is nothing |
| `collator(tokenizer, model)` | a list of examples -> a padded batch |
| `reduce(logits, labels)` | what is kept of the logits for the metrics; `None` where these take generated tokens |
| `metrics(tokenizer, config, evaluation, rows)` | what `Trainer` calls with that and the labels of `rows`, a split's examples |
"""

from . import (
    causal_lm,
    masked_lm,
    pretraining,
    question_answering,
    sequence_classification,
    token_classification,
    translation,
)

TASKS = {
    "translation": translation,
    "causal-lm": causal_lm,
    "masked-lm": masked_lm,
    "pretraining": pretraining,
    "sequence-classification": sequence_classification,
    "token-classification": token_classification,
    "question-answering": question_answering,
}
