//! The page on paper, on small screens, by keyboard, and opened again.

use super::*;

/// Workloads with long names and images that cannot be read.
fn many(count: usize) -> String {
    let image = |n: usize| format!("localhost:1/team/application-with-a-long-name-{n}:1.2.{n}");
    let all =
        (0..count).map(|n| deployment(&format!("workload-{n}"), 1, &[image(n), image(n + 1)]));
    all.collect()
}

/// The number of pages in a PDF of Chromium.
fn pages(pdf: &[u8]) -> usize {
    let text = String::from_utf8_lossy(pdf);
    let all = text.matches("/Type /Page").count();
    all - text.matches("/Type /Pages").count()
}

#[tokio::test]
async fn it_fits_on_paper() {
    let folder = tempfile::tempdir().unwrap();
    let browser = Browser::start(false).await;
    for (workloads, most) in [(31, 6), (300, 40)] {
        let file = page(folder.path(), &many(workloads)).await;
        browser.open(&file, "").await;
        let printed = pages(&browser.print().await);
        assert!(
            (1..=most).contains(&printed),
            "{workloads} workloads: {printed} pages"
        );
    }
    browser.close().await;
}

#[tokio::test]
async fn it_is_used_by_keyboard_and_opened_again() {
    let registry = registry(&["multi", "amd64"]).await;
    let mut all = deployment("old", 1, &[registry.image("amd64")]);
    for n in 0..60 {
        all += &deployment(&format!("fine-{n}"), 1, &[registry.image("multi")]);
    }
    let folder = tempfile::tempdir().unwrap();
    let file = page(folder.path(), &all).await;
    let browser = Browser::start(false).await;
    browser.open(&file, "").await;
    // A link within the open page.
    browser.evaluate("void (location.hash = '#show=no')").await;
    let shown = "document.getElementById('count').textContent";
    assert_eq!(browser.evaluate(shown).await, "1 of 61");
    let live = "document.getElementById('count').getAttribute('aria-live')";
    assert_eq!(browser.evaluate(live).await, "polite");
    browser.evaluate("void (location.hash = '')").await;
    assert_eq!(browser.evaluate(shown).await, "61 of 61");
    // The header row stays in view, and the table can be scrolled without a mouse.
    let region = "document.querySelector('.scroll.tall')";
    let distance = format!(
        "{region}.querySelector('th').getBoundingClientRect().top - {region}.getBoundingClientRect().top"
    );
    browser
        .evaluate(&format!("{region}.scrollTo(0, 500)"))
        .await;
    assert_eq!(browser.evaluate(&format!("{region}.scrollTop")).await, 500);
    assert_eq!(browser.evaluate(&distance).await, 0);
    assert_eq!(browser.evaluate(&format!("{region}.tabIndex")).await, 0);
    // A phone: the page itself is as wide as the screen.
    browser.resize(400, 800).await;
    let overflow = "document.documentElement.scrollWidth - document.documentElement.clientWidth";
    assert_eq!(browser.evaluate(overflow).await, 0);
    let more = format!("{region}.scrollWidth > {region}.clientWidth");
    assert_eq!(browser.evaluate(&more).await, true);
    // The choice of light or dark is kept.
    browser.click("#theme").await;
    browser.open(&file, "").await;
    assert_eq!(
        browser
            .evaluate("document.documentElement.dataset.theme")
            .await,
        "dark"
    );
    assert_eq!(browser.console().await, Vec::<String>::new());
    browser.close().await;
}
