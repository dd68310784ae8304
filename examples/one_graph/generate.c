/* Generates from token ids with one call of onnxruntime, without any code for the search:

    vanilla-transformer export CHECKPOINT translator --generate greedy
    cc -I$ONNXRUNTIME_INCLUDE generate.c -o generate -lonnxruntime
    ./generate translator/onnx/generate.onnx 64 5 9 2

The arguments are the graph, the most new tokens, and the ids of one text; it prints the ids of the sequence. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <onnxruntime_c_api.h>

static const OrtApi *api;

static void check(OrtStatus *status) {
    if (status == NULL) return;
    fprintf(stderr, "%s\n", api->GetErrorMessage(status));
    exit(1);
}

static OrtValue *row(int64_t *values, int64_t count) {
    OrtMemoryInfo *memory;
    OrtValue *tensor;
    int64_t shape[] = {1, count};
    check(api->CreateCpuMemoryInfo(OrtArenaAllocator, OrtMemTypeDefault, &memory));
    check(api->CreateTensorWithDataAsOrtValue(memory, values, count * sizeof *values, shape, 2,
                                              ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64, &tensor));
    api->ReleaseMemoryInfo(memory);
    return tensor;
}

int main(int argc, char **argv) {
    if (argc < 4) return fprintf(stderr, "usage: %s GRAPH MAX_NEW_TOKENS ID...\n", argv[0]), 2;
    const int64_t count = argc - 3;
    int64_t steps = atoll(argv[2]), *ids = malloc(count * sizeof *ids), *mask = malloc(count * sizeof *mask);
    for (int64_t i = 0; i < count; i++) ids[i] = atoll(argv[i + 3]), mask[i] = 1;

    OrtEnv *env;
    OrtSessionOptions *options;
    OrtSession *session;
    api = OrtGetApiBase()->GetApi(ORT_API_VERSION);
    if (api == NULL) return fprintf(stderr, "the library is older than the headers, expected the same release\n"), 1;
    check(api->CreateEnv(ORT_LOGGING_LEVEL_WARNING, "generate", &env));
    check(api->CreateSessionOptions(&options));
    check(api->CreateSession(env, argv[1], options, &session));

    const char *names[] = {"input_ids", "attention_mask", "max_new_tokens"}, *outputs[] = {"sequences"};
    const OrtValue *inputs[] = {row(ids, count), row(mask, count), row(&steps, 1)};
    OrtValue *sequences = NULL;
    check(api->Run(session, NULL, names, inputs, 3, outputs, 1, &sequences));

    OrtTensorTypeAndShapeInfo *info;
    size_t length;
    int64_t *tokens;
    check(api->GetTensorTypeAndShape(sequences, &info));
    check(api->GetTensorShapeElementCount(info, &length));
    check(api->GetTensorMutableData(sequences, (void **)&tokens));
    for (size_t i = 0; i < length; i++) printf("%lld ", (long long)tokens[i]);
    printf("\n");
    return 0;
}
