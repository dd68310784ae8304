// The pipeline of one task over one export, without any option; also what was loaded: the precision of each graph.
export async function run({ pipeline }, { task, model, args }) {
    const pipe = await pipeline(task, model);
    const result = await pipe(...args);
    const loaded = Object.values(pipe.model.sessions).map((session) => session.config);
    return { result: result.tolist?.() ?? result, loaded };
}
