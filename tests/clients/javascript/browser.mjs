// node browser.mjs CHROMIUM URL < jobs.json: runs jobs (see run.mjs) in a page of its own browser, prints the results as JSON.
import { readFileSync } from 'node:fs';
import { chromium } from 'playwright-core';

const [executablePath, url] = process.argv.slice(2);
const browser = await chromium.launch({
    executablePath,
    headless: true,
    args: ['--no-sandbox', '--disable-gpu', '--disable-quic', '--no-first-run', '--disable-background-networking',
        '--disable-component-update', '--disable-sync'],
});
try {
    const page = await browser.newPage();
    page.on('console', (message) => console.error(message.text()));
    page.on('pageerror', (error) => console.error(error));
    await page.goto(url);
    await page.waitForFunction(() => window.run);
    const results = [];
    for (const job of JSON.parse(readFileSync(0))) {
        results.push(await page.evaluate((job) => window.run(job), job));
    }
    console.log(JSON.stringify(results));
} finally {
    await browser.close();
}
