// node node.mjs FOLDER < jobs.json: runs jobs (see run.mjs) over the exports in FOLDER, prints the results as JSON.
import { readFileSync } from 'node:fs';
import * as transformers from '@huggingface/transformers';
import { run } from './run.mjs';

transformers.env.allowRemoteModels = false;
transformers.env.localModelPath = process.argv[2];
transformers.env.logLevel = transformers.LogLevel.ERROR;

const results = [];
for (const job of JSON.parse(readFileSync(0))) {
    results.push(await run(transformers, job));
}
console.log(JSON.stringify(results));
