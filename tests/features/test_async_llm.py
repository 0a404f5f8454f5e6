"""Streams in asyncio have the texts of `generate`; a task that leaves frees its requests."""

import asyncio
import dataclasses
import gc

import pytest
from conftest import check_idle, check_refused, until

from nanoengine import LLM, SamplingParams
from nanoengine.requests import Request
from nanoengine_extras.tools import async_llm
from nanoengine_extras.tools.async_llm import AsyncLLM

pytestmark = pytest.mark.needs("running.metrics", "running.strict", "sampling.texts")
LONG = SamplingParams(max_tokens=2000, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(bundled):
    """With few places."""
    with LLM(bundled, dtype="float32", max_num_seqs=4, num_kv_blocks=256) as llm:
        yield llm


@pytest.fixture
def engine(llm):
    engine = AsyncLLM(llm)
    yield engine
    engine.close()
    check_idle(llm)


async def read(outputs, most: int = 10**9) -> str:
    """The newest text of a stream, after so many outputs or at its end."""
    text = ""
    async for output in outputs:
        text = output.outputs[0].text
        most -= 1
        if most == 0:
            break
    return text


async def text_of(engine, max_tokens: int, prompt: str = "12 + 34 =") -> str:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    return await read(engine.stream(prompt, params))


@pytest.mark.parametrize("most", [10**9, 30])
def test_streams(engine, llm, monkeypatch, most):
    """More streams than places: parts grow; where outputs are too many, they have more tokens."""
    monkeypatch.setattr(async_llm, "MOST_OUTPUTS", most)
    prompts = [[f"Once {number}", "The fox"] for number in range(6)]
    params = SamplingParams(max_tokens=20, n=2, seed=5)
    expected = [[[each.text for each in output.outputs] for output in
                 llm.generate(pair, params, use_tqdm=False)] for pair in prompts]
    num_outputs = []

    async def ask(pair: list[str]) -> list[list[str]]:
        texts = [["", ""], ["", ""]]
        async for output in engine.stream(pair, params):
            new = [each.text for each in output.outputs]
            assert all(now.startswith(old) for now, old in zip(new, texts[output.index]))
            texts[output.index] = new
            num_outputs.append(output.finished)
        return texts

    async def ask_all() -> list:
        return await asyncio.gather(*map(ask, prompts))

    # each loop has its own task for the steps
    for _ in range(2):
        assert asyncio.run(ask_all()) == expected
    assert sum(num_outputs) == 24
    assert len(num_outputs) > 120 if most == 10**9 else len(num_outputs) < 120
    assert not engine.calls


@pytest.mark.needs("tools.chat")
def test_chats(engine, llm):
    """Their answers are those of `chat`; bad input raises its errors."""
    params = SamplingParams(temperature=0)
    chats = [[{"role": "user", "content": question}] for question in ("12 + 34", "sort d b a")]
    begun = [*chats[0], {"role": "assistant", "content": "4"}]
    goes_on = dict(continue_final_message=True, add_generation_prompt=False)

    async def ask(messages, **options) -> str:
        return await read(engine.stream_chat(messages, params, **options))

    async def ask_all() -> list[str]:
        return await asyncio.gather(*map(ask, chats), ask(begun, **goes_on))

    expected = [output.outputs[0].text for output in llm.chat(chats, params, use_tqdm=False)]
    assert asyncio.run(ask_all()) == [*expected, "6"]
    check_refused("messages=", asyncio.run, ask("12 + 34"))
    with pytest.raises(TypeError, match="the nearest is tools"):
        asyncio.run(ask(chats[0], tool=[]))
    assert not llm.active


def test_bad_input(engine, llm):
    for prompt in ("", [99999]):
        check_refused("prompts", asyncio.run, read(engine.stream(prompt)))
    two = [SamplingParams()] * 2
    check_refused("sampling_params=", asyncio.run, read(engine.stream(["a"], two)))
    # nothing to do
    asyncio.run(read(engine.stream([])))
    assert not llm.active


def test_a_task_that_leaves(engine, llm):
    """It frees its requests: in the middle of a step, after an output, or while they wait."""
    async def ask(n: int, most: int = 10**9) -> None:
        await read(engine.stream("Once", dataclasses.replace(LONG, n=n)), most)

    async def main() -> None:
        # all places are taken, and a second task waits
        first = asyncio.create_task(ask(4))
        await until(lambda: llm.metrics()["num_requests_running"] == 4)
        second = asyncio.create_task(ask(1))
        await until(lambda: llm.metrics()["num_requests_waiting"] == 1)
        second.cancel()
        await until(lambda: len(llm.active) == 1 and not llm.metrics()["num_requests_waiting"])
        assert not first.done()
        # the others are served meanwhile
        first.cancel()
        await until(lambda: not llm.active)
        with pytest.raises(asyncio.CancelledError):
            await first
        await ask(2, most=5)
        await until(lambda: not llm.active)
        # cancelled before anything of it has run
        third = asyncio.create_task(ask(1))
        await asyncio.sleep(0)
        third.cancel()
        await asyncio.wait([third])

    before = llm.metrics()["generation_tokens"]
    asyncio.run(main())
    assert llm.metrics()["generation_tokens"] - before < 4 * 1900


def test_a_loop_that_ends_in_the_middle(engine, llm):
    """Its tasks are cancelled; the next loop goes on."""
    async def leave() -> str:
        text = await read(engine.stream("Once", LONG), 4)
        asyncio.create_task(read(engine.stream("Once", LONG)))
        return text

    for _ in range(3):
        assert asyncio.run(leave())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_loop_that_is_closed_before_its_tasks_end(llm):
    """The next call frees their requests, and is answered; so does the end of the engine."""
    engine = AsyncLLM(llm)

    def leave() -> None:
        loop = asyncio.new_event_loop()
        # a loop keeps no reference to its tasks
        tasks.append(loop.create_task(text_of(engine, 2000)))
        loop.run_until_complete(until(lambda: llm.metrics()["num_requests_running"] == 1))
        # the requests of this one are not queued yet
        tasks.append(loop.create_task(text_of(engine, 2000)))
        loop.call_soon(loop.stop)
        loop.run_forever()
        loop.close()

    tasks: list[asyncio.Task] = []
    for _ in range(2):
        leave()
        assert asyncio.run(asyncio.wait_for(text_of(engine, 3), 60)) == " 46"
        assert not llm.active and len(engine.running) == 1
    leave()
    engine.close()
    check_idle(llm)
    # here asyncio warns of them
    tasks.clear()
    engine.running.clear()
    gc.collect()


def test_several_loops(engine, llm):
    """One of them has stopped, and goes on later; two run at once, each in its own thread."""
    expected = asyncio.run(text_of(engine, 100))
    stopped = asyncio.new_event_loop()
    task = stopped.create_task(text_of(engine, 100))
    stopped.run_until_complete(until(lambda: llm.metrics()["num_requests_running"] == 1))

    async def main() -> list[str]:
        beside = [asyncio.to_thread(asyncio.run, text_of(engine, 100), debug=True)
                  for _ in range(3)]
        return await asyncio.wait_for(asyncio.gather(text_of(engine, 100), *beside), 60)

    assert asyncio.run(main(), debug=True) == [expected] * 4
    assert stopped.run_until_complete(asyncio.wait_for(task, 60)) == expected
    stopped.close()


def test_an_engine_that_is_closed(llm):
    """No task waits forever, no request stays, and a later call says what to do."""
    engine = AsyncLLM(llm)
    message = "^the AsyncLLM is closed: make a new one$"

    async def ask() -> None:
        await read(engine.stream("Once", LONG))

    async def main() -> None:
        running = asyncio.create_task(ask())
        await until(lambda: llm.metrics()["num_requests_running"] == 1)
        # its requests are queued while the loop is in `close`
        begun = asyncio.create_task(ask())
        cancelled = asyncio.create_task(ask())
        await asyncio.sleep(0)
        cancelled.cancel()
        engine.close()
        for task in (running, begun):
            with pytest.raises(RuntimeError, match=message):
                await asyncio.wait_for(task, 60)
        await asyncio.wait([cancelled])
        with pytest.raises(RuntimeError, match=message):
            await ask()

    asyncio.run(main())
    engine.close()


def test_an_error_of_an_output_is_that_of_its_task(engine, monkeypatch):
    make = Request.output

    def output(request):
        if request.prompt == "bad":
            raise RuntimeError("it is bad")
        return make(request)

    async def all_of(*prompts: str) -> list:
        return await asyncio.gather(
            *(text_of(engine, 3, each) for each in prompts), return_exceptions=True)

    monkeypatch.setattr(Request, "output", output)
    first, bad, second = asyncio.run(all_of("12 + 34 =", "bad", "12 + 34 ="))
    assert (first, str(bad), second) == (" 46", "it is bad", " 46")


def test_beside_other_threads(engine, llm):
    """Whose steps the tasks share."""
    expected = asyncio.run(text_of(engine, 60))

    async def main() -> list[str]:
        # four run at first, and then two beside the tasks, which need 180 steps
        params = SamplingParams(max_tokens=250, ignore_eos=True)
        other = asyncio.to_thread(llm.generate, ["The fox"] * 6, params, use_tqdm=False)
        beside = asyncio.create_task(other)
        found = [await text_of(engine, 60) for _ in range(3)]
        assert not beside.done()
        await beside
        return found

    assert asyncio.run(main()) == [expected] * 3


def test_it_needs_an_llm(bundled):
    """Not a model, which vLLM's AsyncLLM also takes in other ways."""
    check_refused("llm='.*' is not accepted: it must be an LLM", AsyncLLM, bundled)
