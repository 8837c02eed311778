"""llama.cpp as the other side of the bench: bench_peer.py MODEL THREADS.

Reads one request a line, {"prompt": [ids], "tokens": N}, and answers each with one line of timings. llama.cpp's own
messages go to stderr.
"""

import json
import os
import sys


def main(model, threads):
    # llama.cpp prints where it likes, so the answers get a descriptor of their own.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    import xllamacpp  # after the redirection, since it may print while it loads

    parameters = xllamacpp.CommonParams()
    parameters.model.path = model
    parameters.cpuparams.n_threads = threads
    parameters.cpuparams_batch.n_threads = threads
    parameters.n_ctx = 2048
    parameters.n_parallel = 1
    parameters.warmup = True
    parameters.verbosity = -1
    server = xllamacpp.Server(parameters)
    print(json.dumps({"ready": True}), file=answers)
    for line in sys.stdin:
        asked = json.loads(line)
        answer = server.handle_completions({
            "prompt": asked["prompt"], "n_predict": asked["tokens"], "temperature": 0, "cache_prompt": False,
            "ignore_eos": True,
        })
        if isinstance(answer, (str, bytes)):
            answer = json.loads(answer)
        print(json.dumps(answer.get("timings") or {"error": str(answer)[:500]}), file=answers)
    # Its threads do not always end by themselves.
    answers.flush()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
