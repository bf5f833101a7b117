"""The HiPPO-LegS state matrix, whose states are the Legendre coefficients of the input's past.

Gu et al. 2020, arXiv 2008.07669; as a normal matrix plus a low-rank one Gu, Goel and Re 2021, arXiv
2111.00396, theorem 1 and appendix C.1. NumPy in float64: this runs once, before any training.

Shapes: N states, P = N / 2 conjugate pairs.
"""

import numpy as np


def legs(states: int) -> tuple[np.ndarray, np.ndarray]:
    """A_NN and B_N of HiPPO-LegS: h' = A h + B x.

    A is -sqrt((2n + 1)(2k + 1)) below the diagonal and -(n + 1) on it, B is sqrt(2n + 1).
    """
    root_N = np.sqrt(2 * np.arange(states) + 1)
    A_NN = -np.tril(np.outer(root_N, root_N), -1) - np.diag(np.arange(states) + 1.0)
    return A_NN, root_N


def legs_pairs(states: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(lambda_P, P_P, B_P): LegS in the basis where it is diag(lambda) - P P^*.

    With p_n = sqrt(n + 1/2), A + p p^T is -1/2 plus a skew-symmetric matrix, so a unitary change of
    basis makes it diagonal. Eigenvalues come in conjugate pairs; those of positive imaginary part
    are returned, in rising order. `states` must be even.
    """
    A_NN, B_N = legs(states)
    low_N = np.sqrt(np.arange(states) + 0.5)
    normal_NN = A_NN + np.outer(low_N, low_N)
    # i times a skew-symmetric matrix is Hermitian; exactly skew, or its eigenvectors would not be
    # exactly orthogonal.
    skew_NN = (normal_NN - normal_NN.T) / 2
    frequency_N, basis_NN = np.linalg.eigh(-1j * skew_NN)
    half = slice(states // 2, None)
    into_PN = basis_NN[:, half].conj().T
    return -0.5 + 1j * frequency_N[half], into_PN @ low_N, into_PN @ B_N
