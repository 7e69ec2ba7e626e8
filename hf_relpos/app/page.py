"""The page and its server, which need gradio (extra `app`)."""

import html
from collections.abc import Callable
from functools import wraps
from typing import Any

from ..console import spinner
from ..evaluation import Encoder
from ..evaluation.inspection import has_mlm_head
from ..evaluation.plot import figure_class
from ..extras import import_extra
from .models import CONVERTED, PACKAGED, load
from .views import MASK, attention_figure, cosine_figure, position_figure, prediction_rows, similarity_rows


TITLE = "hf_relpos: two models side by side"
TEXT = f"The captain went down to the {MASK} and looked for a long time at the ship."
ABOUT = f"""# Two models side by side

Give folders or Hub repositories, or `{PACKAGED}`, a small BERT with absolute positions that the package brings, and
`{CONVERTED}`, the same made relative. Type a text; `{MASK}` stands for a word to guess.
"""
POSITIONS = (
    "What positions add to the attention scores in every head of every layer, for the token in the middle; where "
    "vectors are added to the input, how alike they are."
)
ATTENTION = (
    "Attention weights of one head, and what they are without positions: without the terms of this layer, or, where "
    "positions are added to the input, with the same vector added everywhere."
)
PREDICTIONS = (
    f"The most likely tokens for each `{MASK}`, and their probabilities. Where a model predicts no words, as sentence "
    "encoders do not: how similar the lines of the text are, by cosine; one line is compared with three sentences."
)
COSINES = (
    "Cosine of the last hidden states of both models on windows of the packaged novel, *Treasure Island*, by their "
    "length. Past the left model's limit it reads windows that overlap."
)
WINDOW = "Window, right; 0: its own"
COLUMNS = [MASK, "rank", "left", "right"]
PAIR_COLUMNS = ["sentence", "other", "left", "right"]
FONTS = ("system-ui", "sans-serif")  # fonts of the reader's system: none is downloaded


def gradio() -> Any:
    """The gradio module, imported on first use.

    Raises:
        ModuleNotFoundError: without gradio; names the extra.
    """
    return import_extra("gradio", "app", "the page needs")


def _readable(function: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    """Wrap the function of a view: the first output becomes an error message, which replaces the results.

    Outputs without content are hidden.
    """
    gr = gradio()

    @wraps(function)
    def shown(*arguments: Any) -> tuple[Any, ...]:
        try:
            message, results = "", function(*arguments)
        except (ValueError, OSError) as error:  # such as a name too long for the file system
            text = html.escape(" ".join(str(error).split()))
            message, results = f'<p role="alert" style="color: var(--error-text-color)">{text}</p>', ()
        return tuple(
            gr.update(value=each or None, visible=bool(each))
            for each in (message, *(results or [None] * SHOWN[function]))
        )

    return shown


def show_positions(left: str, right: str, text: str) -> tuple[Any, ...]:
    """One figure for each model."""
    return tuple(position_figure(load(name), text) for name in (left, right))


def show_attention(left: str, right: str, text: str, layer: int | None, head: int | None) -> tuple[Any, ...]:
    """One figure for each model; an empty field for a number stands for 0."""
    return tuple(attention_figure(load(name), text, layer or 0, head or 0) for name in (left, right))


def _windowed(name: str, window: int | None) -> Encoder:
    """A model with this `attention_window`; 0 and an empty field stand for its own."""
    return load(name, window) if window else load(name)


def show_predictions(left: str, right: str, text: str, window: int) -> tuple[Any, ...]:
    """Rows of the table of predictions, or else of that of similarities."""
    models = load(left), _windowed(right, window)
    if all(has_mlm_head(encoder.model) for encoder in models):
        return prediction_rows(*models, text), None
    return None, similarity_rows(*models, text)


def show_cosines(left: str, right: str, window: int) -> tuple[Any, ...]:
    """One figure for both models."""
    return (cosine_figure(load(left), _windowed(right, window), as_it_is=load(right) if window else None),)


# Number of results of each view.
SHOWN: dict[Callable[..., tuple[Any, ...]], int] = {
    show_positions: 2,
    show_attention: 2,
    show_predictions: 2,
    show_cosines: 1,
}


def build_page(left: str = PACKAGED, right: str = CONVERTED, window: int = 0) -> Any:
    """Build the page, a `gradio.Blocks`; models are loaded when it is opened.

    Args:
        left, right: names of models for `models.load`.
        window: `attention_window` of the right model; 0 for its own.

    Raises:
        ModuleNotFoundError: without gradio or matplotlib; names the extra.
    """
    gr = gradio()
    figure_class()
    with gr.Blocks(title=TITLE, analytics_enabled=False) as page:
        gr.Markdown(ABOUT)
        with gr.Row():
            models = [gr.Textbox(left, label="Left model"), gr.Textbox(right, label="Right model")]
        text = gr.Textbox(TEXT, label="Text", lines=2)
        with gr.Row():
            layer, head = (
                gr.Number(0, label=label, info="for Attention", precision=0, minimum=0) for label in ("Layer", "Head")
            )
            own = gr.Number(window, label=WINDOW, info="for Masked, similar and Cosine", precision=0, minimum=0)
            show = gr.Button("Show", variant="primary")

        def picture() -> Any:
            return gr.Plot(show_label=False, format="png", visible=False, min_width=320)

        def message() -> Any:
            return gr.HTML(visible=False)

        positions: list[Any] = []
        attention: list[Any] = []
        for title, about, outputs in (("Positions", POSITIONS, positions), ("Attention", ATTENTION, attention)):
            with gr.Tab(title):
                gr.Markdown(about)
                outputs.append(message())
                with gr.Row():
                    for name in ("Left", "Right"):
                        with gr.Column(min_width=320):
                            gr.Markdown(f"**{name}**")
                            outputs.append(picture())
        with gr.Tab("Masked, similar"):
            gr.Markdown(PREDICTIONS)
            masked = [
                message(),
                *(
                    gr.Dataframe(headers=columns, show_label=False, interactive=False, visible=False)
                    for columns in (COLUMNS, PAIR_COLUMNS)
                ),
            ]
        with gr.Tab("Cosine"):
            gr.Markdown(COSINES)
            measure = gr.Button("Measure")
            cosines = [message(), picture()]
        asked = [page.load, show.click, text.submit, layer.change, head.change]
        for function, triggers, inputs, outputs in (
            (show_positions, asked[:3], [*models, text], positions),
            (show_attention, asked, [*models, text, layer, head], attention),
            (show_predictions, asked[:3], [*models, text, own], masked),
            (show_cosines, [measure.click], [*models, own], cosines),
        ):
            gr.on(
                triggers,
                _readable(function),
                inputs,
                outputs,
                api_name=function.__name__,
                concurrency_id="models",  # one view at a time runs a model
                concurrency_limit=1,
            )
    return page


def serve(
    left: str = PACKAGED,
    right: str = CONVERTED,
    host: str = "127.0.0.1",
    port: int = 7860,
    block: bool = True,
    window: int = 0,
) -> Any:
    """Serve the page, by default for this machine only.

    Args:
        left, right: names of models for `models.load`; loaded first, so that a wrong name fails at once.
        host: address to listen at. Anyone who reaches it can load any checkpoint that this process can read.
        port: port to listen at; 0 for the first free one from 7860.
        window: `attention_window` of the right model; 0 for its own.
        block: return when the server is stopped (Ctrl-C), instead of at once.

    Returns:
        The page; `close` stops the server, `local_url` is its address.

    Raises:
        ModuleNotFoundError: without gradio or matplotlib; names the extra.
        ValueError: for models that cannot be loaded, and a port in use.
    """
    gr = gradio()
    page = build_page(left, right, window)
    with spinner("loading the models"):
        for name in (left, right):
            load(name)
        _windowed(right, window)
    try:
        page.launch(
            server_name=host,
            server_port=port or None,
            share=False,
            quiet=True,
            prevent_thread_lock=True,
            ssr_mode=False,
            footer_links=[],
            theme=gr.themes.Default(primary_hue="indigo", font=FONTS, font_mono=("ui-monospace", "monospace")),
        )
    except OSError as error:
        raise ValueError(
            f"--port {port}: is taken, or --host {host} is no address here ({error}); give another"
        ) from error
    print(f"{TITLE}: {page.local_url}  (Ctrl-C ends it)", flush=True)
    if block:
        page.block_thread()
    return page
