"""The page behind `hf-relpos app`: two models side by side on a text.

`models` loads them, `views` computes and draws what is shown, `page` puts it on a page and serves that. Only `page`
needs gradio (extra `app`).
"""
