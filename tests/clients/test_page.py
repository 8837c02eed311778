"""docs/api.md keeps its word: every field of its tables is sent, to a causal model and to one that denoises, and every field
that the official clients know is in the tables."""

import json
import re
import unittest
import urllib.error
import urllib.request

from anthropic.types import message_create_params
from openai.types import completion_create_params as text_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import response_create_params
from support import ROOT, miniature, smollm2, user

CHAT, TEXT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
#: What a request to each route cannot do without.
LEAST = {
    CHAT: {"messages": user("hi"), "max_tokens": 2}, TEXT: {"prompt": "hi", "max_tokens": 2},
    RESPONSES: {"input": "hi", "max_output_tokens": 2}, MESSAGES: {"messages": user("hi"), "max_tokens": 2},
}
#: Fields of the official clients that are sent as headers.
HEADERS = {"user_profile_id", "workspace_id"}
OFFICIAL = {
    CHAT: [chat_params.CompletionCreateParamsBase, chat_params.CompletionCreateParamsStreaming],
    TEXT: [text_params.CompletionCreateParamsBase, text_params.CompletionCreateParamsStreaming],
    RESPONSES: [response_create_params.ResponseCreateParamsBase, response_create_params.ResponseCreateParamsStreaming],
    MESSAGES: [message_create_params.MessageCreateParamsBase, message_create_params.MessageCreateParamsStreaming],
}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FUNCTION = {"name": "f", "description": "d", "parameters": SCHEMA}
TOOL = {"type": "function", "function": FUNCTION}
#: A value for each field that asks for something; a dictionary with "…" is a whole set of members.
VALUES = {
    "model": None, "max_tokens": 3, "max_completion_tokens": {"…": {"max_tokens": None, "max_completion_tokens": 3}},
    "temperature": 0.5, "top_p": 0.5, "min_p": 0.1, "top_k": 5, "repetition_penalty": 1.1, "repeat_penalty": 1.1,
    "presence_penalty": 0.5, "frequency_penalty": 0.5, "logit_bias": {"5": 1}, "logprobs": True,
    "response_format": {"type": "json_object"}, "json_schema": SCHEMA, "grammar": 'start: "a"', "n": 2, "best_of": 3, "seed": 4,
    "stop": ["x"], "ignore_eos": True, "stream": True, "stream_options": {"…": {"stream": True, "stream_options": {"include_usage": True}}},
    "max_denoising_steps": 4, "entropy_bound": 1, "confidence_threshold": 0.1, "user": "u", "metadata": {"k": "v"}, "store": True,
    "service_tier": "auto", "safety_identifier": "s", "prompt_cache_key": "k", "prompt_cache_options": {"mode": "auto"},
    "prompt_cache_retention": "24h", "audio": {"voice": "x", "format": "wav"}, "moderation": {"model": "m"},
    "prediction": {"type": "content", "content": "x"}, "verbosity": "low", "web_search_options": {}, "modalities": ["audio"],
    "enable_thinking": True, "messages": user("ho"), "top_logprobs": {"…": {"logprobs": True, "top_logprobs": 2}}, "tools": [TOOL],
    "tool_choice": {"…": {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}}},
    "parallel_tool_calls": False, "functions": [FUNCTION], "function_call": {"name": "f"}, "chat_template_kwargs": {"x": 1},
    "reasoning_effort": "low", "echo": True, "suffix": "x", "prompt": "ho",
    "input": [{"role": "user", "content": "ho"}], "instructions": "x", "max_output_tokens": 3, "reasoning": {"effort": "low"},
    "text": {"format": {"type": "json_object"}}, "include": ["reasoning.encrypted_content"],
    "background_options": {"completion_window": "soonest"}, "access_programs": {}, "image": {}, "previous_response_id": "r",
    "conversation": "c", "background": True, "truncation": "auto", "max_tool_calls": 1,
    "context_management": [{"type": "compaction"}], "system": "x", "stop_sequences": ["x"], "thinking": {"type": "enabled", "budget_tokens": 1024},
    "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}, "cache_control": {"type": "ephemeral"},
    "inference_geo": "us", "speed": "fast", "diagnostics": {}, "container": "c", "mcp_servers": [{"name": "m"}],
}
#: Where a route has another value for it.
OTHERS = {
    TEXT: {"logprobs": 1, "top_logprobs": 2, "tool_choice": "required", "parallel_tool_calls": "x"},
    RESPONSES: {
        "top_logprobs": 2, "prompt": {"id": "p"}, "tools": [{"type": "function"} | FUNCTION],
        "tool_choice": {"…": {"tools": [{"type": "function"} | FUNCTION], "tool_choice": {"type": "function", "name": "f"}}},
    },
    MESSAGES: {
        "tools": [{"name": "f", "description": "d", "input_schema": SCHEMA}], "context_management": {"edits": [{"type": "x"}]},
        "tool_choice": {"…": {"tools": [{"name": "f", "input_schema": SCHEMA}], "tool_choice": {"type": "tool", "name": "f"}}},
        "max_tokens": 3,
    },
}
#: Fields that belong together: errors may name the other.
NAMED = {"top_logprobs": "logprobs"}
#: Whether a field is taken, by a causal model whose template knows no thinking, and by one that denoises and whose template does.
TAKEN = {
    "honoured": (True, True), "causal": (True, False), "canvas": (False, True), "template": (False, True),
    "no effect": (True, True), "refused": (False, False),
}


def tables():
    """For each route its fields and the words beside them."""
    found, routes = {}, []
    for line in (ROOT / "docs/api.md").read_text().splitlines():
        if line.startswith("#"):
            routes = re.findall(r"`(/v1/[a-z/]+)`", line) if line.startswith("### Fields of") else []
        cells = [cell.strip() for cell in line.split("|")]
        if routes and line.startswith("| `"):
            for route in routes:
                for field in re.findall(r"`([a-z_]+)`", cells[1]):
                    assert field not in found.setdefault(route, {}), f"{route} has {field} twice"
                    found[route][field] = cells[2]
    return found


def send(daemon, route, body):
    """Status and the answer's JSON, or its first bytes where it is a stream."""
    request = urllib.request.Request(daemon.url + route, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            text = answer.read()
            return answer.status, json.loads(text) if answer.headers["content-type"] == "application/json" else text[:200]
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


class Page(unittest.TestCase):
    def test_the_official_clients_know_no_field_that_is_not_in_the_tables(self):
        found = tables()
        self.assertEqual(set(found), set(OFFICIAL))
        for route, kinds in OFFICIAL.items():
            known = {field for kind in kinds for field in kind.__annotations__} - HEADERS
            self.assertGreater(len(known), 15)
            self.assertEqual(known - set(found[route]), set(), route)

    def test_each_field_is_taken_or_refused_as_it_says(self):
        for route, fields in tables().items():
            for field, word in fields.items():
                value = OTHERS.get(route, {}).get(field, VALUES[field])
                more = value["…"] if isinstance(value, dict) and "…" in value else {field: value}
                for daemon, taken in zip((smollm2(), miniature()), TAKEN[word]):
                    with self.subTest(route=route, field=field, word=word, model=daemon.name):
                        status, answer = send(daemon, route, LEAST[route] | more)
                        self.assertEqual(status, 200 if taken else 400, answer)
                        if not taken:
                            names = [name for name in (field, NAMED.get(field)) if name]
                            self.assertTrue(any(f"`{name}" in answer["error"]["message"] for name in names), answer)
                        if not taken and route != MESSAGES:
                            self.assertTrue(any(answer["error"]["param"].startswith(name) for name in names), answer)


if __name__ == "__main__":
    unittest.main()
