"""The noise scale of sign methods and of Muon, by what their steps have in common with held-out gradients.

These optimizers step by u(g), of a length that does not depend on the gradient's (u is the sign, or Muon's
orthogonalisation), and what a batch of m samples achieves is a(m) = E<u(g_m), g'>, where g' is the mean gradient of
other samples: the first-order decrease of the loss per unit of learning rate. Every a(m) is measured without bias in
each window, whatever the noise; the length of the true gradient that belongs to u (l1, nuclear) cannot be.

With little signal a(m) grows as the square root of m, and with much it is constant. The cost of a step does not depend
on m, so the best rate is proportional to a(m) and the progress of a step at that rate to a(m)^2. Hence the data
efficiency e(m) = (a(m)^2 / m) / lim (a(n)^2 / n) for small n, which is 1 for tiny batches, and **the noise scale b is
the batch at which it is 1/2**. When the ratios of signal to noise are Gaussian over the coordinates,

    a(m) = a_inf / sqrt(1 + b/m)        e(m) = 1 / (1 + m/b)

holds exactly for the sign, since E[x erf(x sqrt(m/2))] over x ~ N(0, v) is v sqrt(2 m / pi) / sqrt(1 + v m). Other
spectra, and Muon, bend earlier or later. The family e(m) = (1 + s x) / (1 + 2 s x + x^2) with x = m/b has the initial
slope -s/b and covers them: s is 0.81 for equal ratios, 1.8 for squared ratios that are lognormal with a standard
deviation of 1.5, and 0.6 to 1.7 for Muon with spectra from flat to steep (simulated). Far below b the data cannot tell
s. So b is fitted with s = 1, and its interval holds for every s between 1/2 and 2.
"""

from adabatch.alignment.curves import Point
from adabatch.alignment.estimator import Alignment, AlignmentEstimator, Reading, fixed_rate_efficiency

__all__ = ["Alignment", "AlignmentEstimator", "Point", "Reading", "fixed_rate_efficiency"]
