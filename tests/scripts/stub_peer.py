#!/usr/bin/env python3
"""Stands in for a Python with llama.cpp in the tests of the bench: bench_peer.py MODEL THREADS SPECULATION CONTEXT.

Takes 2 ms a token; ngram-simple has half of its tokens accepted at once and takes 1 ms, ngram-cache guesses in vain and
takes 4 ms. STUB_PEER_FAULT=tokens has it count one token of a prompt more.
"""

import json
import os
import sys

MS = {"ngram-simple": 1.0, "ngram-cache": 4.0}


def main(script, _model, _threads, speculation, _context):
    assert script.endswith("bench_peer.py"), script
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        words = asked["messages"][0]["content"].split() + ["<turn>"] if "messages" in asked else asked["prompt"].split()
        count = asked["tokens"]
        timings = {
            "prompt_n": len(words) + (os.environ.get("STUB_PEER_FAULT") == "tokens"), "prompt_per_second": 1000.0,
            "predicted_n": count, "predicted_ms": MS.get(speculation, 2.0) * count, "text": "words",
        }
        if speculation == "ngram-simple":
            timings |= {"draft_n": count, "draft_n_accepted": count // 2}
        print(json.dumps(timings), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
