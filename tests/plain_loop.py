"""The plain loop: one token at a time, each chosen from the logits that the one before it produced.

It is the oracle for the engine, so it stays this short.
"""

from collections.abc import Iterator, Sequence

from coldstream.decoding import Continuation, SamplingParams
from coldstream.engine import CompletionOutput, OpenedModel, Piece
from coldstream.engine.answer import AnswerState, Request, completion
from coldstream.engine.request_reader import RequestReader


def plain_pieces(opened: OpenedModel, request: Request) -> Iterator[Piece]:
    """The pieces of one answer, computed in a sequence of its own from an empty state."""
    runner, ids = opened.runner, request.prompt_token_ids
    answer = AnswerState(request, opened.tokenizer, runner.expert_uses, opened.grammars.constraint(request))
    tokens = Continuation(ids, end_ids=request.all_end_ids, max_tokens=request.max_tokens)
    sequence, new_ids = runner.new_sequence(), list(ids)
    try:
        while not (tokens.has_ended or answer.has_stopped):
            chosen = answer.chooser(runner.extend(sequence, new_ids), tokens.ids)
            tokens.append(chosen.token_id, runner.spec.vocab_size)
            piece, new_ids = answer.push(chosen), [chosen.token_id]
            if not answer.has_stopped:
                yield piece
        yield answer.last_piece("length", 0, runner.expert_uses)
    finally:
        runner.release(sequence)


def plain_output(
    opened: OpenedModel, prompt: Sequence[int] | str, params: SamplingParams
) -> CompletionOutput:
    """The whole of the only answer."""
    assert params.n == 1
    given = prompt if isinstance(prompt, str) else list(prompt)
    request = RequestReader(opened).of_prompt(given, "prompt", params)
    return completion(0, list(plain_pieces(opened, request)))
