"""`coldstream convert-drafter`: a DFlash drafter of safetensors as the GGUF file that is run."""

from functools import partial
from pathlib import Path

import click

from coldstream.cli.options import check_writable, common_options
from coldstream.cli.terminal import ProgressLine, format_bytes
from coldstream.errors import ModelNotFoundError


@click.command("convert-drafter", short_help="Convert a DFlash drafter to GGUF.")
@click.argument("folder", type=click.Path(path_type=Path))
@click.argument("file", type=click.Path(path_type=Path))
@common_options
def command(folder: Path, file: Path) -> None:
    """Write the DFlash drafter in FOLDER, config.json and safetensors, to the GGUF file FILE.

    All weights keep their bytes. `--model-draft FOLDER` does the same at its first use, into the cache.
    """
    # Imported here because it is not needed to show how the verb is used.
    from coldstream.models.dflash.convert import convert, folder_of
    from coldstream.models.dflash.file import DflashFile

    source = folder_of(folder)
    if source is None:
        raise ModelNotFoundError(f"{folder} is no folder: name the one with config.json and safetensors")
    check_writable(file, "FILE")  # better said now than after the work
    with ProgressLine() as line:
        convert(source, file, partial(line.update, "converting"))
    with DflashFile.open(file) as drafter:
        spec, size = drafter.spec, drafter.gguf.num_bytes
    kind = "DFlash" if spec.second is None else "DFlash 2"
    click.echo(f"{file}: {kind}, {spec.num_layers} layers, blocks of {spec.block_size}, {format_bytes(size)}")
