"""What a batch is: the one data structure that data, objectives and models share.

Shapes: B rows of this micro-batch, S tokens in a row.
"""

from torch import Tensor

Batch = dict[str, Tensor]
"""Field name -> tensor with rows first. A packed text batch has, all int64 and ``(B, S)``:

- ``tokens``: token ids.
- ``labels``: the id that follows each token in its document; `IGNORE_INDEX` where nothing is to be learned.
- ``positions``: position within the document's part in this row, from 0.
- ``document_ids``: equal for tokens that may attend to each other, rising along a row.
"""

IGNORE_INDEX = -100
"""Label of a token that does not count, as in ``torch.nn.functional.cross_entropy``."""
