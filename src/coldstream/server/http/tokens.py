"""POST /tokenize and /detokenize: text and token ids of the served model, in llama.cpp's shapes."""

from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import Field
from starlette.concurrency import run_in_threadpool

from coldstream.gguf.tokenizer import Tokenizer
from coldstream.server.client import EngineClient
from coldstream.server.http.bodies import BodyRoute
from coldstream.server.http.completion_request import TokenIds
from coldstream.server.http.fields import Body, Flag, Text
from coldstream.server.http.shapes import Detokenized, Tokenized, documented


class TokenizeRequest(Body):
    """A text, whose control tokens count unless `parse_special` is false."""

    content: Text
    parse_special: Flag = True
    with_pieces: Flag = False


class DetokenizeRequest(Body):
    """Token ids."""

    tokens: Annotated[TokenIds, Field()]


def tokens_router(client: EngineClient) -> APIRouter:
    """The routes over an engine."""
    router = APIRouter(route_class=BodyRoute)

    @router.post("/tokenize", response_model=None, responses=documented(Tokenized))
    async def tokenize(body: TokenizeRequest) -> dict[str, Any]:
        """The token ids of a text."""
        return await run_in_threadpool(_tokenized, client.model.tokenizer, body)

    @router.post("/detokenize", response_model=None, responses=documented(Detokenized))
    async def detokenize(body: DetokenizeRequest) -> dict[str, Any]:
        """The text of token ids, control tokens included."""
        tokenizer = client.model.tokenizer
        return {"content": await run_in_threadpool(tokenizer.decode, body.tokens, skip_special=False)}

    return router


def _tokenized(tokenizer: Tokenizer, body: TokenizeRequest) -> dict[str, Any]:
    ids = tokenizer.encode(body.content, parse_special=body.parse_special)
    if not body.with_pieces:
        return {"tokens": ids}
    return {"tokens": [{"id": each, "piece": tokenizer.decode((each,), skip_special=False)} for each in ids]}
