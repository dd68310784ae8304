// The same for Node and for the browser: texts in, texts out. `ort` is onnxruntime-node or onnxruntime-web.
const MAX_NEW_TOKENS = 64n;

export async function generate(ort, session, tokenizer, texts) {
    const { input_ids, attention_mask } = tokenizer(texts, { padding: true });
    const tensor = ({ data, dims }) => new ort.Tensor('int64', data, dims);
    const steps = new BigInt64Array(texts.length).fill(MAX_NEW_TOKENS);
    const { sequences } = await session.run({
        input_ids: tensor(input_ids),
        attention_mask: tensor(attention_mask),
        max_new_tokens: new ort.Tensor('int64', steps, [texts.length, 1]),
    });
    const [, length] = sequences.dims;
    const rows = texts.map((_, row) => Array.from(sequences.data.slice(row * length, (row + 1) * length), Number));
    return tokenizer.batch_decode(rows, { skip_special_tokens: true });
}
