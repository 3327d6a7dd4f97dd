"""coldstream: Mixture-of-Experts language models larger than the GPU, from GGUF files.

    from coldstream import LLM, SamplingParams

    with LLM("model.gguf", vram="8GiB") as llm:
        for output in llm.generate(["def fibonacci(n):"], SamplingParams(temperature=0, max_tokens=64)):
            print(output.outputs[0].text)
        for piece in llm.stream("import os"):
            print(piece.text, end="")

`LLM` opens a model; `generate` and `chat` give a list of `RequestOutput`, `stream` and `stream_chat` a
`Stream` of `Piece`. `AsyncLLM` has the same methods for asyncio. The same prompt and seed give the same
tokens, on a GPU or a CPU, whatever the memory budget. All errors are children of `ColdstreamError`.
docs/python.md shows all of it.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from coldstream.engine import (
        LLM,
        CompletionOutput,
        Executor,
        Grammar,
        Logprob,
        Piece,
        Policy,
        RepetitionStop,
        RequestOutput,
        SamplingParams,
        Statistics,
        Stream,
        TextPrompt,
        Thought,
        TokensPrompt,
    )
    from coldstream.engine.async_llm import AsyncLLM
    from coldstream.errors import (
        ColdstreamError,
        ConfigError,
        DeviceError,
        DownloadError,
        GenerationFault,
        InvalidRequestError,
        ModelChangedError,
        ModelFormatError,
        ModelNotFoundError,
        OutOfMemoryError,
        TemplateError,
        UnsupportedError,
    )

    __version__: str

__all__ = [
    "LLM",
    "AsyncLLM",
    "ColdstreamError",
    "CompletionOutput",
    "ConfigError",
    "DeviceError",
    "DownloadError",
    "Executor",
    "GenerationFault",
    "Grammar",
    "InvalidRequestError",
    "Logprob",
    "ModelChangedError",
    "ModelFormatError",
    "ModelNotFoundError",
    "OutOfMemoryError",
    "Piece",
    "Policy",
    "RepetitionStop",
    "RequestOutput",
    "SamplingParams",
    "Statistics",
    "Stream",
    "TemplateError",
    "TextPrompt",
    "Thought",
    "TokensPrompt",
    "UnsupportedError",
    "__version__",
]


if not TYPE_CHECKING:  # or any name at all would pass a type checker

    def __getattr__(name: str) -> Any:
        """The public names, imported when first asked for: the command line's help must not pay for them."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        if name == "__version__":
            return _installed_version()
        from coldstream import errors

        if hasattr(errors, name):
            return getattr(errors, name)
        if name == "AsyncLLM":  # asyncio takes memory and time that others need not pay for
            from coldstream.engine.async_llm import AsyncLLM

            return AsyncLLM
        from coldstream import engine

        return getattr(engine, name)

    def _installed_version() -> str:
        """The version of the installed package, which its build took from git's tags."""
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("coldstream")
        except PackageNotFoundError:
            return "0+uninstalled"

    def __dir__() -> list[str]:
        """What `help` and completion list; the names in `__all__` are not there before they are asked for."""
        return sorted({*globals(), *__all__})
