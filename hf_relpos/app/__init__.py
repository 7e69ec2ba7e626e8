"""The page behind `hf-relpos app`: two models side by side on a text.

`models` loads the models, `views` computes tables and draws figures, and `page` builds and serves the page. Only
`page` needs gradio (extra `app`).
"""
