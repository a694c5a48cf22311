"""Every constant of the detector, with its reason; lengths are logged points. `docs/results/detector.md` says what each moves.

The values come from theory (Siegmund's approximation for the CUSUM, exponential tails for the threshold) or are round
numbers of the right size; none is fitted to a single curve. Numbers that belong to a formula stand in the formula.
"""

# Sudden: a robust z against a fast level
WARM_POINTS = 8  # before them nothing is judged
NOISE_POINTS = 48  # residuals whose quartiles give the local noise
FAST_GAIN = 0.4  # of the fast level, which spans four points
LEVEL_FLOOR = 0.002  # of the level: noise below it is print rounding, and a difference below it is none
DECADES_FLOOR = 0.02  # the same for a channel that is folded in decades
SUDDEN_LEAST, SUDDEN_MOST = 7.0, 20.0  # bounds of the threshold, in units of the noise
TAIL_SHARE, TAIL_GAIN = 0.05, 0.007  # the tail begins where so many points lie above, and how fast that is learnt
TAIL_LEAST = 1.2  # units of noise, where it begins at least
TAIL_ODDS = 11.0  # ln(0.05 / 8e-7) mean excesses: one false alarm in 1.2M points under an exponential tail
MAJOR_RISE = 0.2  # of the level: a spike that a person calls major is sudden from MAJOR_ODDS mean excesses on
MAJOR_ODDS = 6.0
HEAVY_TAIL = 0.75  # a mean excess from which one point by itself needs the whole threshold: such a run has hard batches
RECORD = 2.0  # times the highest of the last residuals: a spike is no lower
CLIP = 4.0  # one point counts as at most so many units of the noise, in a level and in a sum

# A run that spikes often
OFTEN_POINTS = 96  # the span in which spikes are counted
OFTEN_SPIKES = 6  # so many in that span, one in 16 points, are the noise of the run

# Slow: a CUSUM against a level that does not follow what it suspects
SLOW_POINTS, MIDDLE_POINTS = 768, 96  # spans of the two levels
LAG_POINTS = 48  # how old the middle level is that the slow one is compared with
CUSUM_HEIGHT, CUSUM_SLACK = 15.0, 0.5  # Siegmund: one alarm in 21M independent points; the surplus pays for estimation
DOUBT = 1.5  # the level is an estimate: each point counts DOUBT / sqrt(age) less
YOUNG_POINTS = 128  # the height is (1 + YOUNG_POINTS / age) times as high
SUSPICION = 0.34  # of the height: above it the levels are frozen
BLOCK_POINTS = 32  # whose means show how much a run wanders by itself

# An event
HIGH_RISE = 3.0  # units of noise: nearer than that a point is back among the others
EQUIVALENT = 0.4  # units of noise: the margin of the recovery test
WANDERS = 2.7  # times its own drift: what stays so far up is proposed before it has stayed for long
STAY_POINTS = 150  # points after which a level that stays is proposed
ACCEPT_POINTS = 600  # points after which the new level is the usual one
JOIN_ROWS = 200  # channels that alarm this close together tell of one event

# Watches
USUAL_POINTS = 32  # points that show what is usual in a log
NON_FINITE_POINTS = 3  # in a row: weights that no longer work
