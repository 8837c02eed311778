"""llama.cpp as the other side of the bench: bench_peer.py MODEL THREADS [SPECULATION [CONTEXT]].

Reads one request a line, {"prompt": ids or text, "tokens": N} or {"messages": [...], "tokens": N}, with "temperature" and
"seed" if it is not greedy, and answers each with one line: llama.cpp's timings, and the text as "text". SPECULATION is
one of its kinds that need no second model (ngram-simple, ngram-map-k, ngram-map-k4v, ngram-mod, ngram-cache), with the
sizes that it has by default; none for plain decoding. llama.cpp's own messages go to stderr.
"""

import json
import os
import sys


def main(model, threads, speculation="none", context="2048"):
    # llama.cpp prints where it likes, so the answers get a descriptor of their own.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    import xllamacpp  # after the redirection, since it may print while it loads

    parameters = xllamacpp.CommonParams()
    parameters.model.path = model
    parameters.cpuparams.n_threads = int(threads)
    parameters.cpuparams_batch.n_threads = int(threads)
    parameters.n_ctx = int(context)
    parameters.n_parallel = 1
    parameters.warmup = True
    parameters.verbosity = -1
    parameters.use_jinja = True
    if speculation != "none":
        kind = "COMMON_SPECULATIVE_TYPE_" + speculation.replace("-", "_").upper()
        parameters.speculative.types = [getattr(xllamacpp.common_speculative_type, kind)]
    server = xllamacpp.Server(parameters)
    print(json.dumps({"ready": True}), file=answers)
    for line in sys.stdin:
        asked = json.loads(line)
        request = {
            "n_predict": asked["tokens"], "temperature": asked.get("temperature", 0), "seed": asked.get("seed", 0),
            "cache_prompt": False, "ignore_eos": True,
        }
        if "messages" in asked:
            answer = server.handle_chat_completions(request | {"messages": asked["messages"]})
        else:
            answer = server.handle_completions(request | {"prompt": asked["prompt"]})
        if isinstance(answer, (str, bytes)):
            answer = json.loads(answer)
        if "timings" in answer:
            text = answer["choices"][0]["message"]["content"] if "messages" in asked else answer.get("content")
            told = answer["timings"] | {"text": text}
        else:
            told = {"error": str(answer)[:500]}
        print(json.dumps(told), file=answers)
    # Its threads do not always end by themselves.
    answers.flush()
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
