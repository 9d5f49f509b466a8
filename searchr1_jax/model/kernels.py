"""Products and attention whose gradients are written out, in the forms that run at matrix speed.

What autodiff makes of them is right but, on CPUs, half as fast: it contracts transposed copies of
activations. And on every device a kernel's gradient is summed in float32, whatever the activations
are. Axes beyond those of types.py: E head size, R query heads that share one key-value head.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
import numpy as np
from jaxtyping import Array, Bool, Float

_MASKED = -1e30  # finite, so that a query with nothing to see yields numbers, not NaN


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def project(x: Array, kernel: Array, inputs: int = 1) -> Array:
  """x · kernel in x's dtype, contracting x's last `inputs` axes with the kernel's first ones."""
  last = tuple(range(x.ndim - inputs, x.ndim))
  return lax.dot_general(x, kernel.astype(x.dtype), ((last, tuple(range(inputs))), ((), ())))


def _project_forward(x, kernel, inputs):
  return project(x, kernel, inputs), (x, kernel)


def _project_backward(inputs, kept, dy):
  x, kernel = kept
  outputs = kernel.ndim - inputs
  dx = lax.dot_general(dy, kernel.astype(dy.dtype),
                       ((tuple(range(dy.ndim - outputs, dy.ndim)),
                         tuple(range(inputs, kernel.ndim))), ((), ())))
  rows = tuple(range(x.ndim - inputs))
  over_rows = lambda a, b: lax.dot_general(a, b, ((rows, rows), ((), ())),
                                           preferred_element_type=kernel.dtype)
  if math.prod(kernel.shape[:inputs]) <= math.prod(kernel.shape[inputs:]):
    return dx, over_rows(x, dy)
  turned = _as_it_is(over_rows(dy, x))  # the narrow factor first: the fast form
  return dx, jnp.transpose(turned, (*range(outputs, kernel.ndim), *range(outputs)))


project.defvjp(_project_forward, _project_backward)


@jax.custom_vjp
def swiglu(gate: Array, up: Array) -> Array:
  """silu(gate) · up; its backward pass computes the sigmoid again instead of keeping it."""
  return gate * jax.nn.sigmoid(gate) * up


def _swiglu_backward(kept, dy):
  gate, up = kept
  share = jax.nn.sigmoid(gate)
  passed = gate * share
  return dy * up * (share + passed * (1 - share)), dy * passed


swiglu.defvjp(lambda gate, up: (swiglu(gate, up), (gate, up)), _swiglu_backward)


@jax.custom_vjp
def attend(q_BKRLE: Float[Array, "B K R L E"], k_BKSE: Float[Array, "B K S E"],
           v_BKSE: Float[Array, "B K S E"], visible_BLS: Bool[Array, "#B L S"]
           ) -> Float[Array, "B K R L E"]:
  """softmax(q k / sqrt(E)) v over the visible keys, the softmax in float32.

  Source: Vaswani et al., arXiv:1706.03762; heads shared as in Ainslie et al., arXiv:2305.13245.
  The backward pass computes the shares again from the largest score and the sum of a query's terms
  (after Dao et al., arXiv:2205.14135).
  """
  return _attend_forward(q_BKRLE, k_BKSE, v_BKSE, visible_BLS)[0]


def attend_cached(q_BKRLE: Float[Array, "B K R L E"], k_BKES: Float[Array, "B K E S"],
                  v_BKSE: Float[Array, "B K S E"], visible_BLS: Bool[Array, "B L S"]
                  ) -> Float[Array, "B K R L E"]:
  """`attend` without gradients over keys that lie as a cache keeps them: slots side by side.

  A decode step reads keys as a matrix times a vector; in this order it goes at memory speed.
  """
  return _mix(_scores(q_BKRLE, k_BKES, visible_BLS, features=2), v_BKSE, q_BKRLE.shape)[0]


def _attend_forward(q_BKRLE, k_BKSE, v_BKSE, visible_BLS):
  out_BKRLE, top_BKM1, sum_BKM1 = _mix(_scores(q_BKRLE, k_BKSE, visible_BLS), v_BKSE, q_BKRLE.shape)
  return out_BKRLE, (q_BKRLE, k_BKSE, v_BKSE, visible_BLS, top_BKM1, sum_BKM1)


def _mix(scores_BKMS, v_BKSE, shape):
  """Values mixed by the softmax of the scores; the largest score and the sum of a query's terms."""
  top_BKM1 = jnp.max(scores_BKMS, axis=-1, keepdims=True)
  terms_BKMS = jnp.exp(scores_BKMS - top_BKM1)
  sum_BKM1 = jnp.sum(terms_BKMS, axis=-1, keepdims=True)
  out_BKME = _product(terms_BKMS.astype(v_BKSE.dtype), v_BKSE, 3, 2) / sum_BKM1
  return out_BKME.reshape(shape).astype(v_BKSE.dtype), top_BKM1, sum_BKM1


def _attend_backward(kept, dout_BKRLE):
  q_BKRLE, k_BKSE, v_BKSE, visible_BLS, top_BKM1, sum_BKM1 = kept
  q_BKME, dout_BKME = _merge(q_BKRLE), _merge(dout_BKRLE)
  # Not exp(score - (top + log sum)): of large scores that one float32 would lose the sum.
  shares_BKMS = jnp.exp(_scores(q_BKRLE, k_BKSE, visible_BLS) - top_BKM1) * (1 / sum_BKM1)
  dv_BKES = _product(dout_BKME, shares_BKMS.astype(v_BKSE.dtype), 2, 2)
  slope_BKMS = _product(dout_BKME, v_BKSE, 3, 3)
  # Not dout · out, which is the same but for out's rounding: that error is common to all keys.
  mean_BKM1 = jnp.sum(shares_BKMS * slope_BKMS, axis=-1, keepdims=True)
  scale = np.float32(q_BKRLE.shape[-1] ** -0.5)
  dscores_BKMS = (shares_BKMS * (slope_BKMS - mean_BKM1) * scale).astype(q_BKRLE.dtype)
  dq_BKME = _product(dscores_BKMS, k_BKSE, 3, 2)
  dk_BKES = _product(q_BKME, dscores_BKMS, 2, 2)
  back = lambda x_BKES, like: jnp.swapaxes(_as_it_is(x_BKES), 2, 3).astype(like.dtype)
  return (dq_BKME.reshape(q_BKRLE.shape).astype(q_BKRLE.dtype), back(dk_BKES, k_BKSE),
          back(dv_BKES, v_BKSE), None)


attend.defvjp(_attend_forward, _attend_backward)


def _as_it_is(x: Array) -> Array:
  """Keeps XLA from turning a product round to save the transpose that follows it."""
  return lax.optimization_barrier(x)


def _merge(x_BKRLE):
  """Query heads and positions as one axis M of rows of a matrix."""
  return x_BKRLE.reshape(*x_BKRLE.shape[:2], -1, x_BKRLE.shape[-1])


def _product(a, b, axis_a: int, axis_b: int):
  """A matrix product in float32 for each row and key-value head."""
  return lax.dot_general(a, b, (((axis_a,), (axis_b,)), ((0, 1), (0, 1))),
                         preferred_element_type=jnp.float32)


def _scores(q_BKRLE, k, visible_BLS, features: int = 3):
  """q k / sqrt(E) where visible, as good as nothing elsewhere; `features`: the axis E of k."""
  size = q_BKRLE.shape
  scores_BKMS = _product(_merge(q_BKRLE), k, 3, features) * np.float32(size[-1] ** -0.5)
  scores = scores_BKMS.reshape(*size[:4], -1)
  return jnp.where(visible_BLS[:, None, None], scores, np.float32(_MASKED)).reshape(
      scores_BKMS.shape)
