"""LiteLLM's Python client, to which this is one more server that speaks as OpenAI's."""

import asyncio
import unittest

import support  # noqa: F401 (it settles how litellm starts)
import litellm
from support import CAPITALS, PATIENCE, cancelled, capital, eventually, idle, miniature, smollm2, user

litellm.suppress_debug_info = True


def target(daemon, name):
    return {"model": f"openai/{name}", "api_base": f"{daemon.url}/v1", "api_key": "none", "timeout": PATIENCE, "num_retries": 0}


class Completions(unittest.TestCase):
    def ask(self, country="Australia", **more):
        return litellm.completion(**target(miniature(), "tiny-diffusion"), messages=user(capital(country)), seed=1, **more)

    def test_a_reply(self):
        reply = self.ask()
        self.assertEqual(reply.choices[0].message.content, "The capital of Australia is Canberra.")
        self.assertEqual(reply.choices[0].finish_reason, "stop")
        self.assertEqual(reply.usage.total_tokens, reply.usage.prompt_tokens + reply.usage.completion_tokens)

    def test_a_stream_and_its_usage(self):
        chunks = list(self.ask("Japan", stream=True, stream_options={"include_usage": True}))
        self.assertEqual("".join(c.choices[0].delta.content or "" for c in chunks if c.choices), "The capital of Japan is Tokyo.")
        self.assertEqual(litellm.stream_chunk_builder(chunks).usage.completion_tokens, self.ask("Japan").usage.completion_tokens)

    def test_thoughts_come_beside_the_reply(self):
        reply = litellm.completion(
            **target(miniature(), "tiny-diffusion"), messages=user("What is 3 + 4?"), seed=1,
            extra_body={"chat_template_kwargs": {"enable_thinking": True}},
        )
        self.assertEqual(reply.choices[0].message.content, "3 + 4 = 7")
        self.assertTrue(reply.choices[0].message.reasoning_content)

    def test_texts_are_continued(self):
        more = target(smollm2(), "smollm2") | {"model": "text-completion-openai/smollm2"}
        reply = litellm.text_completion(**more, prompt="The capital of France is", max_tokens=8, temperature=0)
        self.assertIn("Paris", reply.choices[0].text)

    def test_errors_have_their_types(self):
        for more, kind in (({"temperature": 3}, litellm.BadRequestError),
                           ({"messages": user("hi " * 3000)}, litellm.ContextWindowExceededError),
                           ({"model": "openai/gpt-4"}, litellm.NotFoundError)):
            with self.subTest(kind=kind.__name__), self.assertRaises(kind):
                litellm.completion(**target(miniature(), "tiny-diffusion") | {"messages": user("hi")} | more)


class Async(unittest.IsolatedAsyncioTestCase):
    async def test_many_at_once(self):
        to = target(miniature(), "tiny-diffusion")

        async def whole(country):
            reply = await litellm.acompletion(**to, messages=user(capital(country)), seed=1)
            return reply.choices[0].message.content

        async def streamed(country):
            stream = await litellm.acompletion(**to, messages=user(capital(country)), seed=1, stream=True)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        found = await asyncio.gather(*(ask(country) for country in CAPITALS for ask in (whole, streamed)))
        self.assertEqual(found, [f"The capital of {c} is {CAPITALS[c]}." for c in CAPITALS for _ in range(2)])

    async def test_leaving_a_stream_frees_the_slot(self):
        daemon = smollm2()
        await asyncio.to_thread(eventually, "the daemon is idle", lambda: idle(daemon))
        before = cancelled(daemon)
        stream = await litellm.acompletion(
            **target(daemon, "smollm2"), messages=user("Write a long story."), stream=True, max_tokens=4000, ignore_eos=True)
        async for _ in stream:
            break
        await stream.aclose()
        await asyncio.to_thread(eventually, "the slot is free", lambda: idle(daemon) and cancelled(daemon) == before + 1)


if __name__ == "__main__":
    unittest.main()
