"""Arrays, functions and pipelines over meshes that share no devices."""

from ._training.mpmd import (
    Action as Action,
    Pass as Pass,
    Pipeline as Pipeline,
    Schedule as Schedule,
    TransferError as TransferError,
    fetch as fetch,
    gpipe as gpipe,
    initialize as initialize,
    interleaved as interleaved,
    is_remote as is_remote,
    jit as jit,
    one_f_one_b as one_f_one_b,
    pipeline as pipeline,
    split as split,
    transfer as transfer,
    transport as transport,
    zero_bubble as zero_bubble,
)
