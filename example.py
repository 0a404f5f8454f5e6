"""Generates in a batch, in a chat and as a stream, with the bundled model or another one.

    python example.py                       # models/tiny-qwen3, nothing to download
    python example.py Qwen/Qwen3-0.6B       # a Hugging Face id or a folder
"""

import sys
from pathlib import Path

from nanoengine import LLM, SamplingParams

BUNDLED = Path(__file__).resolve().parent / "models" / "tiny-qwen3"


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else BUNDLED
    with LLM(model) as llm:
        prompts = ["Once upon a time", "47 + 85 =", "sort d b e a =", "count 17 to 23 ="]
        params = SamplingParams(temperature=0.6, max_tokens=150, seed=1)
        for output in llm.generate(prompts, params):
            print(f"{output.prompt}{output.outputs[0].text}\n")

        conversations = [
            [{"role": "user", "content": "12 + 34"}],
            [{"role": "user", "content": "copy ball fox red"}],
        ]
        outputs = llm.chat(conversations, SamplingParams(temperature=0, max_tokens=20))
        for messages, output in zip(conversations, outputs):
            print(f"{messages[0]['content']} -> {output.outputs[0].text}")

        print("\nA story as it is written: ", end="", flush=True)
        shown = 0
        story = [{"role": "user", "content": "Tell me a story about a fox."}]
        params = SamplingParams(temperature=0.6, max_tokens=150, seed=2)
        for output in llm.stream_chat(story, params):
            text = output.outputs[0].text
            print(text[shown:], end="", flush=True)
            shown = len(text)
        print()


if __name__ == "__main__":
    main()
