"""PyTorch tensors. Imported only when torch is loaded already.

A call goes down this list, and each file knows only those below it:

- `entry`, `kvcache`, `sdpa`: where calls come in.
- `compile`: aule as operators of PyTorch, for Dynamo, export and functorch.
- `autograd`: eager calls with gradients. `passes`: forward and backward pass on the route of their tensors.
- `route`: which device serves a tensor. `devices`: how each computes a call.
- `repeated`: calls like an earlier one, from one look-up to the launch.
- `attention`, `varlen`, `decode`, `row_ops`: one op each, as a `calls.Call` with its problem and views.
- `views`, `checks`, `modes`, `seeds`: memory of tensors, checks of arguments, PyTorch's state, seeds of dropout.
"""
