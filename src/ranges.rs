//! A set of steps or ranks as ascending, disjoint, inclusive ranges: a million equal steps cost sixteen bytes.

/// Inclusive ranges, ascending, neither overlapping nor adjacent, so that equal sets are equal values.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Ranges(Vec<(u64, u64)>);

impl Ranges {
    /// No member.
    pub fn new() -> Self {
        Self::default()
    }

    /// The ranges, ascending.
    pub fn as_slice(&self) -> &[(u64, u64)] {
        &self.0
    }

    /// Whether there is no member.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Number of members; `u64::MAX` also stands for one more.
    pub fn count(&self) -> u64 {
        self.0.iter().fold(0, |n: u64, (a, b)| n.saturating_add(b - a).saturating_add(1))
    }

    /// Adds `first..=last`, which must begin after every member so far began.
    pub fn push(&mut self, first: u64, last: u64) {
        debug_assert!(first <= last);
        match self.0.last_mut() {
            Some(end) if first <= end.1.saturating_add(1) => end.1 = end.1.max(last),
            _ => self.0.push((first, last)),
        }
    }

    /// In either set.
    #[must_use]
    pub fn union(&self, other: &Self) -> Self {
        let mut all: Vec<_> = self.0.iter().chain(&other.0).copied().collect();
        all.sort_unstable();
        let mut out = Self::new();
        for (a, b) in all {
            out.push(a, b);
        }
        out
    }

    /// In both sets.
    #[must_use]
    pub fn intersection(&self, other: &Self) -> Self {
        let (mut i, mut j, mut out) = (0, 0, Self::new());
        while let (Some(a), Some(b)) = (self.0.get(i), other.0.get(j)) {
            let (first, last) = (a.0.max(b.0), a.1.min(b.1));
            if first <= last {
                out.push(first, last);
            }
            if a.1 < b.1 { i += 1 } else { j += 1 }
        }
        out
    }

    /// In this set and not in the other.
    #[must_use]
    pub fn difference(&self, other: &Self) -> Self {
        let mut out = Self::new();
        let mut cuts = other.0.iter().peekable();
        for &(mut first, last) in &self.0 {
            while cuts.next_if(|c| c.1 < first).is_some() {}
            let mut rest = cuts.clone();
            let mut whole = true;
            while let Some(cut) = rest.next_if(|c| c.0 <= last) {
                if cut.0 > first {
                    out.push(first, cut.0 - 1);
                }
                if cut.1 >= last {
                    whole = false;
                    break;
                }
                first = cut.1 + 1;
            }
            if whole {
                out.push(first, last);
            }
        }
        out
    }
}

impl FromIterator<(u64, u64)> for Ranges {
    /// Ranges in any order, overlapping or not.
    fn from_iter<I: IntoIterator<Item = (u64, u64)>>(ranges: I) -> Self {
        let mut all: Vec<_> = ranges.into_iter().collect();
        all.sort_unstable();
        let mut out = Self::new();
        for (a, b) in all {
            out.push(a, b);
        }
        out
    }
}
