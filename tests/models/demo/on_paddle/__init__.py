"""The demo's transformer in Paddle; needs the ``paddlepaddle`` package."""
