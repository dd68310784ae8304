// npm install onnxruntime-node @huggingface/transformers
// vanilla-transformer export CHECKPOINT translator --generate greedy
// node node.mjs translator "A man sleeps." "A dog runs."
import { dirname, resolve, basename } from 'node:path';
import * as ort from 'onnxruntime-node';
import { AutoTokenizer, env } from '@huggingface/transformers';
import { generate } from './generate.mjs';

const [directory, ...texts] = process.argv.slice(2);
env.allowRemoteModels = false;
env.localModelPath = dirname(resolve(directory));
const tokenizer = await AutoTokenizer.from_pretrained(basename(resolve(directory)));
const session = await ort.InferenceSession.create(`${directory}/onnx/generate.onnx`);
for (const text of await generate(ort, session, tokenizer, texts)) console.log(text);
